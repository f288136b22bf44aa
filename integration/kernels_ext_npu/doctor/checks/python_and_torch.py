"""Checks Python, torch, and what a plain `import torch` does."""

from __future__ import annotations

import platform
import sys
from typing import Any

from packaging.version import Version

from kernels_ext_npu import __file__ as package_file
from kernels_ext_npu import __version__
from kernels_ext_npu.doctor.findings import Finding, not_checked, ok, problem, warning
from kernels_ext_npu.doctor.installed_packages import Package
from kernels_ext_npu.doctor.known_errors import CPU_INDEX, explained
from kernels_ext_npu.doctor.observations import Observations

PYTHON = ((3, 10), (3, 15))
ARCHITECTURES = ("x86_64", "aarch64")
WRONG_BUILD = "Two accelerators cannot be used at the same time"
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def python(_: Observations) -> Finding:
    """Check the release of Python, the operating system and the processor."""
    found = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    if not PYTHON[0] <= sys.version_info[:2] < PYTHON[1]:
        advice = "Make an environment with Python 3.11; 3.10 and 3.12 to 3.14 are accepted, and untried."
        return problem(found, advice=advice)
    if platform.system() != "Linux" or platform.machine() not in ARCHITECTURES:
        advice = "torch_npu exists for Linux on x86_64 and aarch64: use such a machine, or a container."
        return problem(found, advice=advice)
    return ok(found)


def python_facts(_: Observations) -> dict[str, Any]:
    """Return which Python this is, and which kernels_ext_npu."""
    return {"executable": sys.executable, "kernels_ext_npu": __version__, "folder": package_file}


def torch(seen: Observations) -> Finding:
    """Check that torch is installed, can be imported, and is a CPU build."""
    package, outcome, imported = seen.packages["torch"], seen.torch, seen.torch.facts.get("torch")
    again = (cpu_build(seen),)
    if not package.installed:
        return problem(
            "not installed",
            advice="Install its CPU build, in the release that fits torch_npu and CANN.",
            commands=(f"pip install torch=={wanted_torch(seen)} --index-url {CPU_INDEX}",),
        )
    contradicts = _contradiction(package, imported)
    if seen.torch_build is not None:
        twice = f"what is imported calls itself {imported}: two installations lie over one another"
        return problem(
            f"{package.version or imported} is a build for {seen.torch_build}",
            details=(twice,) if contradicts else (),
            advice="torch_npu extends CPU builds of torch and refuses all others. On PyPI plain torch is a CUDA build, "
            "on aarch64 too since 2.11. Install the CPU build.",
            commands=again,
            see=WRONG_BUILD,
        )
    if not seen.torch_works:
        return problem(
            f"{package.version} cannot be imported: {outcome.cause}",
            **explained(outcome.errors, "Install it again.", again),
            facts={"errors": outcome.errors, "output": outcome.output},
        )
    if contradicts or package.trouble:
        return warning(
            f"{imported} is imported, but {package.trouble or f'its metadata says {package.version}'}",
            advice="One installation lies over another, and pip no longer knows which. Install it again.",
            commands=again,
        )
    return ok(f"{imported}, a CPU build")


def torch_facts(seen: Observations) -> dict[str, Any]:
    """Return the version of torch, and what it is built for."""
    version = seen.packages["torch"].version
    return {"version": version and str(version), "build": seen.torch_build}


def autoload(seen: Observations) -> Finding:
    """Check that `import torch` works alone.

    It imports torch_npu by itself, and fails where torch_npu cannot be imported.
    """
    switch = seen.environment.get(AUTOLOAD, "1")
    if not seen.packages["torch"].installed or not seen.torch_works:
        return not_checked("torch cannot be imported at all")
    if switch != "1":  # torch takes everything else for off
        loads = "import torch_npu" if seen.torch_npu_works else "import softnpu"
        return ok(f"off, by {AUTOLOAD}={switch}", details=(f"a program has no NPU before `{loads}`",))
    if seen.torch.hung:
        return not_checked("on, and torch_npu does not end: nor does `import torch`")
    if seen.autoload is None or seen.autoload.failure is None:
        return ok("on: `import torch` works and brings what extends it")
    alone = seen.packages["torch_npu"].installed and not seen.torch_npu_works
    on_software = seen.runs_on_software and not seen.expects_a_card
    return warning(
        f"`import torch` alone fails here: {seen.autoload.cause}",
        details=("torch imports torch_npu by itself" if alone else "torch imports what extends it by itself",),
        advice=f"{SOFTNPU_FIRST if on_software else NPU_FIRST} {WITHOUT_AUTOLOAD}",
        commands=(*["python -m softnpu script.py"] * on_software, f"export {AUTOLOAD}=0"),
        see="Failed to load the backend extension",
        facts={"errors": seen.autoload.errors},
    )


SOFTNPU_FIRST = "Put `import softnpu` before torch, or run programs with `python -m softnpu`."
NPU_FIRST = "It works again when torch_npu does. Programs that need no NPU work in an environment without torch_npu."
WITHOUT_AUTOLOAD = (
    "Switching autoload off helps programs that use torch alone: transformers imports torch_npu where it is installed."
)


def autoload_facts(seen: Observations) -> dict[str, Any]:
    """Return the switch of autoload."""
    return {AUTOLOAD: seen.environment.get(AUTOLOAD, "1")}


def cpu_build(seen: Observations) -> str:
    """Return the command that installs the right torch."""
    return f"pip install --force-reinstall --no-deps torch=={wanted_torch(seen)} --index-url {CPU_INDEX}"


def wanted_torch(seen: Observations) -> str:
    """Return the release of torch to install: what torch_npu asks for, or the one that is there."""
    asked = [requirement for requirement in seen.packages["torch_npu"].requires if requirement.name == "torch"]
    for specifier in (each for requirement in asked for each in requirement.specifier):
        if specifier.operator in ("==", "~="):
            return specifier.version.removesuffix(".*")
    there = [version for name in ("torch_npu", "torch") if (version := seen.packages[name].version) is not None]
    return there[0].base_version if there else "2.13.0"


def _contradiction(package: Package, imported: str | None) -> bool:
    """Tell whether the metadata of torch names another release or build than the one that is imported.

    Older wheels leave `+cpu` out of the metadata, which does not count.
    """
    if imported is None or package.version is None:
        return False
    found, named = Version(imported), package.version
    return found.public != named.public or bool(found.local and named.local and found.local != named.local)
