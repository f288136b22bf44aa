"""Checks transformers, kernels, and what both need: are they in each other's windows, and in what was tested?"""

from __future__ import annotations

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from kernels_ext_npu.doctor import packages, use_probe
from kernels_ext_npu.doctor.findings import Finding, not_checked, ok, problem, warning
from kernels_ext_npu.doctor.known_errors import explain
from kernels_ext_npu.doctor.observations import STACK, Observations
from kernels_ext_npu.doctor.packages import Package
from kernels_ext_npu.environment import TESTED

# what kernels_ext_npu itself asks for, beside transformers and kernels
REQUIRED = {"huggingface-hub": SpecifierSet(">=2.4,<3"), "accelerate": SpecifierSet(">=1.10.1,<2")}
WINDOW = "takes kernels >= … and ignores the installed"
TRUE = {"1", "ON", "YES", "TRUE"}  # as transformers reads USE_HUB_KERNELS


def transformers(seen: Observations) -> Finding:
    """Check that transformers can be imported, and is in the range that was tested."""
    package = seen.packages["transformers"]
    failed = _unusable(seen, package, use_probe.TRANSFORMERS)
    if failed:
        return failed
    switch = seen.environment.get("USE_HUB_KERNELS", "YES")
    if switch.upper() not in TRUE:
        return problem(
            "transformers",
            f"{package.version}, but USE_HUB_KERNELS={switch} switches its kernels off",
            advice="Unset it before Python starts.",
            commands=("unset USE_HUB_KERNELS",),
            see="transformers has its kernels switched off by the environment variable USE_HUB_KERNELS",
        )
    return _in_range(package)


def kernels(seen: Observations) -> Finding:
    """Check that kernels can be imported, and is inside the window of transformers."""
    package = seen.packages["kernels"]
    failed = _unusable(seen, package, use_probe.KERNELS)
    if failed:
        return failed
    window = _window(seen.packages["transformers"])
    if window is None:
        return _in_range(package)
    lowest, beyond = window
    facts = {"version": str(package.version), "window": [lowest, beyond]}
    if package.version is not None and not Version(lowest) <= package.version < Version(beyond):
        return problem(
            "kernels",
            f"{package.version}, and {seen.packages['transformers']} takes >= {lowest}, < {beyond}",
            details=("transformers ignores it without a word: use_kernels=True would change nothing",),
            advice="Install a release of kernels that this transformers takes.",
            commands=(f"pip install 'kernels>={lowest},<{beyond}'",),
            see=WINDOW,
            facts=facts,
        )
    return _in_range(package, f"; transformers takes >= {lowest}, < {beyond}", facts)


def helpers(seen: Observations) -> list[Finding]:
    """Check that accelerate and huggingface_hub can be imported, and are in the range that is needed."""
    found = []
    for name, asked in REQUIRED.items():
        package = seen.packages[name]
        failed = _unusable(seen, package, f"import {name.replace('-', '_')}")
        if failed:
            found.append(failed)
        elif package.version is not None and not asked.contains(package.version, prereleases=True):
            found.append(
                problem(
                    name,
                    f"{package.version}, and kernels-ext-npu needs {asked}",
                    advice="Install a release in this range.",
                    commands=(f"pip install '{name}{asked}'",),
                )
            )
        else:
            found.append(ok(name, str(package.version)))
    return found


def requirements(seen: Observations) -> Finding:
    """Check what the packages ask of others in their metadata, as `pip check` does."""
    lines: list[str] = []
    asked: dict[str, SpecifierSet] = {}
    for package in seen.packages.values():
        for requirement, there in packages.unmet(package):
            name = canonicalize_name(requirement.name)
            if name == "torch" or (name in STACK and not there.installed):
                continue  # told by itself, and pip would take a CUDA build of torch
            found = f"found {there.version}" if there.version else there.trouble or "not installed"
            lines.append(f"{package.name} asks for {name}{requirement.specifier}: {found}")
            asked[name] = asked.get(name, SpecifierSet()) & requirement.specifier
    if not lines:
        return ok("requirements", f"{', '.join(name for name in seen.packages)} have what they ask for")
    return warning(
        "requirements",
        f"{len(lines)} of what packages ask for {'is' if len(lines) == 1 else 'are'} not there",
        details=tuple(lines),
        advice="Install it; look that pip takes neither torch nor torch_npu away.",
        commands=tuple(f"pip install '{name}{specifier}'" for name, specifier in asked.items()),
    )


def _in_range(package: Package, more: str = "", facts: dict | None = None) -> Finding:
    tested = TESTED[package.name]
    facts = {"version": str(package.version), "tested": str(tested)} | (facts or {})
    if package.version is not None and not tested.contains(package.version, prereleases=True):
        return warning(
            package.name,
            f"{package.version}, tested with {tested}{more}",
            advice="It may work. If it does not, take a release that was tested.",
            commands=(f"pip install '{package.name}{tested}'",),
            see="kernels-ext-npu was tested with",
            facts=facts,
        )
    return ok(package.name, f"{package.version}{more}", facts=facts)


def _unusable(seen: Observations, package: Package, step: str) -> Finding | None:
    """Say that a package is not installed, installed badly, or not to be imported; None if it can be used."""
    name, asked = package.name, TESTED.get(package.name) or REQUIRED[package.name]
    install = (f"pip install '{name}{asked}'",)
    if not package.installed:
        return problem(
            name,
            "not installed",
            advice="Install it.",
            commands=install,
            see="is not installed: pip install" if name in TESTED else None,
        )
    if package.trouble:
        return problem(
            name,
            package.trouble,
            advice="Its installation is incomplete or damaged. Install it again.",
            commands=(f"pip install --force-reinstall --no-deps '{name}{asked}'",),
        )
    for outcome in (seen.use, seen.imports, seen.hub):
        if outcome is not None and outcome.failure and outcome.step == step:
            if (missing := seen.missing(outcome)) is not None:
                return not_checked(name, f"{package.version}, but {missing} is not installed")
            known = explain(outcome.errors)
            return problem(
                name,
                f"{package.version} cannot be imported: {outcome.cause}",
                details=(known.meaning,) if known else (),
                advice=known.advice if known else "Install it again.",
                commands=(known.commands if known else ()) or (f"pip install --force-reinstall '{name}{asked}'",),
                see=known.see if known else None,
                facts={"errors": outcome.errors, "output": outcome.output},
            )
    return None


def _window(package: Package) -> tuple[str, str] | None:
    """Read from the source of transformers which releases of kernels it takes; None where it does not say.

    It need not be imported for that.
    """
    if package.folder is None:
        return None
    found = packages.constants(package.folder / "utils" / "import_utils.py")
    lowest, beyond = found.get("KERNELS_MIN_VERSION"), found.get("KERNELS_MAX_VERSION")
    try:
        return (str(Version(lowest)), str(Version(beyond))) if lowest and beyond else None
    except InvalidVersion:
        return None
