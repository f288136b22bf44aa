"""Checks transformers, kernels, and what both need: are they in each other's windows, and in what was tested?"""

from __future__ import annotations

from dataclasses import replace

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from kernels_ext_npu.doctor import installed_packages
from kernels_ext_npu.doctor.findings import Finding, not_checked, ok, problem, remedy, warning
from kernels_ext_npu.doctor.installed_packages import Package
from kernels_ext_npu.doctor.observations import STACK, Observations
from kernels_ext_npu.doctor.probes import KERNELS, TRANSFORMERS
from kernels_ext_npu.environment import TAKEN_TOGETHER, TESTED

# what kernels_ext_npu itself asks for, beside transformers and kernels
REQUIRED = {"huggingface-hub": SpecifierSet(">=2.4,<3"), "accelerate": SpecifierSet(">=1.10.1,<2")}
TRUE = {"1", "ON", "YES", "TRUE"}  # as transformers reads USE_HUB_KERNELS


def transformers(seen: Observations) -> Finding:
    """Check that transformers can be imported, and is in the range that was tested."""
    package, switch = seen.packages["transformers"], seen.environment.get("USE_HUB_KERNELS", "YES")
    if failed := _unusable(seen, package, TRANSFORMERS):
        return failed
    if switch.upper() not in TRUE:
        said = f"{package.version}, but USE_HUB_KERNELS={switch} switches its kernels off"
        return problem(said, **remedy("kernels switched off"))
    return _in_range(package)


def kernels(seen: Observations) -> Finding:
    """Check that kernels can be imported, is inside the window of transformers, and has all that is reached of it."""
    package, window = seen.packages["kernels"], _window(seen.packages["transformers"])
    if failed := _unusable(seen, package, KERNELS):
        return failed
    if window is None:
        return _in_range(package)
    (lowest, beyond), facts = window, {"version": str(package.version), "window": [*window]}
    if package.version is not None and not Version(lowest) <= package.version < Version(beyond):
        is_tested = TESTED["kernels"].contains(lowest)
        case = "kernels outside of the window" if is_tested else "kernels that may not be had"
        return problem(
            f"{package.version}, and {seen.packages['transformers']} takes >= {lowest}, < {beyond}",
            details=("transformers ignores it without a word: use_kernels=True would change nothing",),
            **remedy(case, lowest=lowest, beyond=beyond, together=TAKEN_TOGETHER),
            facts=facts,
        )
    if gone := next((each.facts["gone"] for each in (seen.use, seen.imports) if each and "gone" in each.facts), None):
        said = f"{package.version} is another inside than what was tested: {TESTED['kernels']}"
        told = remedy("kernels is another inside", wanted=f"kernels{TESTED['kernels']}")
        return warning(said, details=tuple(gone), **told, facts=facts)
    found = _in_range(package, f"; transformers takes >= {lowest}, < {beyond}")
    return replace(found, facts=found.facts | facts)


def helpers(seen: Observations) -> list[Finding]:
    """Check that accelerate and huggingface_hub can be imported, and are in the range that is needed."""
    return [replace(_helper(seen, seen.packages[name], asked), check=name) for name, asked in REQUIRED.items()]


def bitsandbytes(seen: Observations) -> list[Finding]:
    """Check that bitsandbytes has operators for the NPU, where it is installed."""
    package = installed_packages.read("bitsandbytes")
    if not package.installed:
        return []
    found = seen.use.facts if seen.use is not None else {}
    if "bitsandbytes" not in found:
        return [not_checked(f"{package.version}; the device, or a package, does not work: see above")]
    if found["bitsandbytes"] is None:
        return [ok(f"{package.version}, with operators for the NPU", facts={"version": str(package.version)})]
    said = f"{package.version} has no operators for the NPU: {found['bitsandbytes']}"
    return [warning(said, **remedy("bitsandbytes without operators"))]


def requirements(seen: Observations) -> Finding:
    """Check what the packages ask of others in their metadata, as `pip check` does."""
    lines: list[str] = []
    asked: dict[str, SpecifierSet] = {}
    for package in seen.packages.values():
        for requirement in package.requires:
            name, there = canonicalize_name(requirement.name), installed_packages.read(requirement.name)
            if there.version is not None and requirement.specifier.contains(there.version, prereleases=True):
                continue
            if name == "torch" or (name in STACK and not there.installed):
                continue  # told by itself, and pip would take a CUDA build of torch
            found = f"found {there.version}" if there.version else there.trouble or "not installed"
            lines.append(f"{package.name} asks for {name}{requirement.specifier}: {found}")
            asked[name] = asked.get(name, SpecifierSet()) & requirement.specifier
    if not lines:
        return ok(f"{', '.join(seen.packages)} have what they ask for")
    said = f"{len(lines)} of what packages ask for {'is' if len(lines) == 1 else 'are'} not there"
    commands = (f"pip install '{name}{specifier}'" for name, specifier in asked.items())
    return warning(said, details=tuple(lines), **remedy("unmet requirements", *commands))


def _helper(seen: Observations, package: Package, asked: SpecifierSet) -> Finding:
    if failed := _unusable(seen, package, f"import {package.name.replace('-', '_')}"):
        return failed
    if package.version is not None and not asked.contains(package.version, prereleases=True):
        said = f"{package.version}, and kernels-ext-npu needs {asked}"
        return problem(said, **remedy("outside of what is needed", wanted=f"{package.name}{asked}"))
    return ok(str(package.version))


def _in_range(package: Package, more: str = "") -> Finding:
    tested = TESTED[package.name]
    facts = {"version": str(package.version), "tested": str(tested)}
    if package.version is None or tested.contains(package.version, prereleases=True):
        return ok(f"{package.version}{more}", facts=facts)
    to_do = remedy("outside of what was tested", wanted=f"{package.name}{tested}")
    return warning(f"{package.version}, tested with {tested}{more}", **to_do, facts=facts)


def _unusable(seen: Observations, package: Package, step: str) -> Finding | None:
    """Say that a package is not installed, installed badly, or not to be imported; None if it can be used."""
    name = package.name
    wanted = f"{name}{TESTED.get(name) or REQUIRED[name]}"
    if not package.installed:
        case = "transformers or kernels not installed" if name in TESTED else "not installed"
        return problem("not installed", **remedy(case, wanted=wanted))
    if package.trouble:
        return problem(package.trouble, **remedy("damaged installation", wanted=wanted))
    for outcome in (seen.use, seen.imports, seen.hub):
        if outcome is not None and outcome.failure and outcome.step == step:
            if (missing := seen.missing(outcome)) is not None:
                return not_checked(f"{package.version}, but {missing} is not installed")
            said = f"{package.version} cannot be imported: {outcome.cause}"
            return outcome.problem(said, "Install it again.", (f"pip install --force-reinstall '{wanted}'",))
    return None


def _window(package: Package) -> tuple[str, str] | None:
    """Read from the source of transformers which releases of kernels it takes; None where it does not say.

    It need not be imported for that.
    """
    if package.folder is None:
        return None
    found = installed_packages.constants(package.folder / "utils" / "import_utils.py")
    lowest, beyond = found.get("KERNELS_MIN_VERSION"), found.get("KERNELS_MAX_VERSION")
    try:
        return (str(Version(lowest)), str(Version(beyond))) if lowest and beyond else None
    except InvalidVersion:
        return None
