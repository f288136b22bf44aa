"""Checks Python, torch, and what a plain `import torch` does."""

from __future__ import annotations

import platform
import sys

from packaging.version import Version

from kernels_ext_npu import __file__ as package_file
from kernels_ext_npu import __version__
from kernels_ext_npu.doctor.findings import Finding, not_checked, ok, problem, warning
from kernels_ext_npu.doctor.known_errors import CPU_INDEX, explain
from kernels_ext_npu.doctor.observations import Observations
from kernels_ext_npu.doctor.packages import Package

PYTHON = ((3, 10), (3, 15))
ARCHITECTURES = ("x86_64", "aarch64")
WRONG_BUILD = "Two accelerators cannot be used at the same time"


def python(_: Observations) -> Finding:
    """Check the release of Python, the operating system and the processor."""
    found = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    facts = {"executable": sys.executable, "kernels_ext_npu": __version__, "folder": package_file}
    if not PYTHON[0] <= sys.version_info[:2] < PYTHON[1]:
        return problem(
            "Python", found, advice="Use Python 3.10 to 3.14: make an environment with one of these.", facts=facts
        )
    if platform.system() != "Linux" or platform.machine() not in ARCHITECTURES:
        return problem(
            "Python",
            found,
            advice="torch_npu exists for Linux on x86_64 and aarch64: use such a machine, or a container.",
            facts=facts,
        )
    return ok("Python", found, facts=facts)


def torch(seen: Observations) -> Finding:
    """Check that torch is installed, can be imported, and is a CPU build."""
    package, outcome = seen.packages["torch"], seen.torch
    facts = {"version": package.version and str(package.version), "build": seen.torch_build}
    install = (cpu_build(seen),)
    if not package.installed:
        return problem(
            "torch",
            "not installed",
            advice="Install its CPU build, in the release that fits torch_npu and CANN.",
            commands=(f"pip install torch=={wanted_torch(seen)} --index-url {CPU_INDEX}",),
            facts=facts,
        )
    if seen.torch_build is not None:
        return problem(
            "torch",
            f"{package.version or outcome.facts.get('torch')} is a build for {seen.torch_build}",
            details=(f"what is imported calls itself {outcome.facts['torch']}: two installations lie over one another",)
            if _contradiction(package, outcome.facts)
            else (),
            advice="torch_npu extends CPU builds of torch and refuses all others. On PyPI plain torch is a CUDA build, "
            "on aarch64 too since 2.11. Install the CPU build.",
            commands=install,
            see=WRONG_BUILD,
            facts=facts,
        )
    if not seen.torch_works:
        known = explain(outcome.errors)
        return problem(
            "torch",
            f"{package.version} cannot be imported: {outcome.cause}",
            details=(known.meaning,) if known else (),
            advice=known.advice if known else "Install it again.",
            commands=(known.commands if known else None) or install,
            facts=facts | {"errors": outcome.errors, "output": outcome.output},
        )
    imported = outcome.facts["torch"]
    if _contradiction(package, outcome.facts) or package.trouble:
        told = package.trouble or f"its metadata says {package.version}"
        return warning(
            "torch",
            f"{imported} is imported, but {told}",
            advice="One installation lies over another, and pip no longer knows which. Install it again.",
            commands=install,
            facts=facts,
        )
    return ok("torch", f"{imported}, a CPU build", facts=facts)


def autoload(seen: Observations) -> Finding:
    """Check that `import torch` works alone.

    It imports torch_npu by itself, and fails where torch_npu cannot be imported.
    """
    switch = seen.environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    facts = {"TORCH_DEVICE_BACKEND_AUTOLOAD": switch}
    if not seen.packages["torch"].installed or not seen.torch_works:
        return not_checked("autoload", "torch cannot be imported at all", facts=facts)
    if switch != "1":  # torch takes everything else for off
        loads = "import torch_npu" if seen.torch_npu_works else "import softnpu"
        return ok(
            "autoload",
            f"off, by TORCH_DEVICE_BACKEND_AUTOLOAD={switch}",
            details=(f"a program has no NPU before `{loads}`",),
            facts=facts,
        )
    if seen.torch.hung:
        return not_checked("autoload", "on, and torch_npu does not end: nor does `import torch`", facts=facts)
    if seen.autoload is None or seen.autoload.failure is None:
        return ok("autoload", "on: `import torch` works and brings what extends it", facts=facts)
    cause = seen.autoload.cause
    alone = seen.packages["torch_npu"].installed and not seen.torch_npu_works
    return warning(
        "autoload",
        f"`import torch` alone fails here: {cause}",
        details=("torch imports torch_npu by itself" if alone else "torch imports what extends it by itself",),
        advice="Put `import softnpu` before torch, run programs with `python -m softnpu`, or switch autoload off for "
        "those that need no NPU."
        if seen.runs_on_software and not seen.expects_a_card
        else "It works again when torch_npu does. Until then programs that need no NPU work with autoload off.",
        commands=("export TORCH_DEVICE_BACKEND_AUTOLOAD=0",),
        see="Failed to load the backend extension",
        facts=facts | {"errors": seen.autoload.errors},
    )


def cpu_build(seen: Observations) -> str:
    """Return the command that installs the right torch."""
    return f"pip install --force-reinstall --no-deps torch=={wanted_torch(seen)} --index-url {CPU_INDEX}"


def wanted_torch(seen: Observations) -> str:
    """Return the release of torch to install: what torch_npu asks for, or the one that is there."""
    for requirement in seen.packages["torch_npu"].requires:
        if requirement.name == "torch":
            for specifier in requirement.specifier:
                if specifier.operator in ("==", "~="):
                    return specifier.version.removesuffix(".*")
    for name in ("torch_npu", "torch"):
        version = seen.packages[name].version
        if version is not None:
            return version.base_version
    return "2.13.0"


def _contradiction(package: Package, facts: dict) -> bool | str | None:
    """Tell whether the metadata of torch names another release or build than the one that is imported.

    Older wheels leave `+cpu` out of the metadata, which does not count.
    """
    if "torch" not in facts or package.version is None:
        return False
    imported, named = Version(facts["torch"]), package.version
    return imported.public != named.public or (imported.local and named.local and imported.local != named.local)
