"""Checks Python, torch and torch_npu, whether they fit one another, and what a plain `import torch` does."""

from __future__ import annotations

import platform
import sys

from packaging.version import Version

from kernels_ext_npu.doctor.findings import Finding, explained, not_checked, ok, problem, remedy, warning
from kernels_ext_npu.doctor.installed_packages import Package
from kernels_ext_npu.doctor.observations import Observations, Outcome, scripts

PYTHON = ((3, 10), (3, 15))
ARCHITECTURES = ("x86_64", "aarch64")
WRONG_BUILD = "Two accelerators cannot be used at the same time"
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
UNKNOWN = "Look at the error, and install torch_npu again in the release that fits."


def python(_: Observations) -> Finding:
    """Check the release of Python, the operating system and the processor."""
    found = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    if not PYTHON[0] <= sys.version_info[:2] < PYTHON[1]:
        return problem(found, **remedy("Python"))
    if platform.system() != "Linux" or platform.machine() not in ARCHITECTURES:
        return problem(found, **remedy("system"))
    return ok(found)


def torch(seen: Observations) -> Finding:
    """Check that torch is installed, can be imported, and is a CPU build."""
    package, outcome, imported = seen.packages["torch"], seen.torch, seen.torch.facts.get("torch")
    again = cpu_build(seen)
    if not package.installed:
        return problem("not installed", **remedy("no torch", release=wanted_torch(seen)))
    contradicts = _contradiction(package, imported)
    if seen.torch_build is not None:
        twice = f"what is imported calls itself {imported}: two installations lie over one another"
        return problem(
            f"{package.version or imported} is a build for {seen.torch_build}",
            details=(twice,) if contradicts else (),
            **remedy("another build of torch", again),
        )
    if not seen.torch_works:
        said = f"{package.version} cannot be imported: {outcome.cause}"
        return outcome.problem(said, "Install it again.", (again,))
    if contradicts or package.trouble:
        said = f"{imported} is imported, but {package.trouble or f'its metadata says {package.version}'}"
        return warning(said, **remedy("two installations of torch", again))
    return ok(f"{imported}, a CPU build")


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
        **remedy(f"autoload{', software device' * on_software}"),
        facts={"errors": seen.autoload.errors},
    )


def cpu_build(seen: Observations) -> str:
    """Return the command that installs the right torch."""
    (command,) = remedy("no torch", release=wanted_torch(seen))["commands"]
    return command.replace("pip install", "pip install --force-reinstall --no-deps")


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


def torch_npu(seen: Observations) -> Finding:
    """Check that torch_npu is installed, can be imported, and is for this torch."""
    package, unfit = seen.packages["torch_npu"], _unfit(seen)
    if not package.installed:
        return problem("not installed", **remedy("no torch_npu", *_install(seen)))
    if not seen.torch_works or seen.torch_build is not None:
        return not_checked(f"{package.version}, but torch does not work with it: see torch above")
    if not seen.torch_npu_works:
        return _without_cann(seen) or _failed(seen, seen.torch)
    if unfit:
        return warning(f"{package.version} {unfit}", **remedy("torch_npu for another torch", *_install(seen)))
    return ok(seen.torch.facts["torch_npu"])


def _without_cann(seen: Observations) -> Finding | None:
    """Judge torch_npu by the software device where nothing points to a card; None where that says nothing.

    CANN's libraries are to be missing there.
    """
    if not seen.only_cann_is_missing or seen.expects_a_card or seen.use is None:
        return None
    version = seen.packages["torch_npu"].version
    if seen.runs_on_software:
        alone = f"alone it ends in {seen.torch.cause}: there is no CANN here"
        return ok(f"{version}, on the software device", details=(alone,))
    if seen.software_failed_by_itself:
        return not_checked(f"{version}; the software device does not start: see device")
    # with CANN's libraries it comes further, and says what else is missing
    return _failed(seen, seen.use) if seen.use.failure else None


def _failed(seen: Observations, outcome: Outcome) -> Finding:
    version, unfit = seen.packages["torch_npu"].version, _unfit(seen)
    told = explained(outcome.errors, UNKNOWN, _install(seen))
    if outcome.hung:
        told |= remedy("torch_npu hangs")
    elif unfit:
        told |= remedy("torch_npu for another torch", *_install(seen))
    elif told["see"] == WRONG_BUILD:
        told["commands"] = (cpu_build(seen),)
    elif seen.only_cann_is_missing and seen.expects_a_card and not (seen.named_cann and seen.named_cann["exists"]):
        told |= remedy("CANN is missing")
    elif seen.only_cann_is_missing and (commands := scripts(seen.cann_places)):
        told |= remedy("CANN is not set up", *commands)
    if seen.only_cann_is_missing and seen.runs_on_software:
        told["details"] += ("the software device has them: it works here",)
    if unfit:
        told["details"] += (f"{version} {unfit}",)
    facts = {"failure": outcome.failure, "output": outcome.output}
    return problem(f"{version} cannot be imported: {outcome.cause}", **told, facts=facts)


def _install(seen: Observations) -> tuple[str, ...]:
    torch = seen.packages["torch"].version
    release = torch.base_version if torch else wanted_torch(seen)
    return f"pip install --no-deps torch_npu=={release}", "pip install numpy pyyaml"


def _unfit(seen: Observations) -> str | None:
    """Say how torch_npu's metadata disagrees with torch; None if it does not."""
    package, found = seen.packages["torch_npu"], seen.torch.facts.get("torch")
    if package.trouble:
        return f"is installed badly: {package.trouble}"
    if found is None or package.version is None:
        return None
    for requirement in package.requires:
        if requirement.name == "torch" and not requirement.specifier.contains(Version(found), prereleases=True):
            return f"asks for torch{requirement.specifier}, and torch is {found}"
    if package.version.release[:2] != Version(found).release[:2]:
        return f"is for torch {package.version.major}.{package.version.minor}, and torch is {found}"
    return None
