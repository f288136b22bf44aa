"""Checks torch_npu: whether it is installed, can be imported and is for this torch, and what its errors mean."""

from __future__ import annotations

from typing import Any

from packaging.version import Version

from kernels_ext_npu.doctor.checks.python_and_torch import WRONG_BUILD, cpu_build, wanted_torch
from kernels_ext_npu.doctor.findings import Finding, not_checked, ok, problem, warning
from kernels_ext_npu.doctor.known_errors import explained
from kernels_ext_npu.doctor.observations import Observations
from kernels_ext_npu.doctor.outcomes import Outcome

NAME = "torch_npu"
FIT = "Install the releases of torch and torch_npu that belong together; torch_npu names its torch in its own metadata."
SOURCE = "CANN is on this machine: source its script in the shell that starts Python, or in the script of the job."
UNKNOWN = "Look at the error, and install torch_npu again in the release that fits."
HUNG = (
    "Its import does not end. Look whether the driver answers (npu-smi info), whether ASCEND_HOME_PATH lies on a slow "
    "disk, and start Python with `-X importtime` to see where it stays."
)


def torch_npu(seen: Observations) -> Finding:
    """Check that torch_npu is installed, can be imported, and is for this torch."""
    package, unfit = seen.packages[NAME], _unfit(seen)
    if not package.installed:
        return problem(
            "not installed",
            advice="Install the release that fits torch and CANN: with --no-deps, or pip may take another torch. The "
            "software device runs on it too.",
            commands=_install(seen),
            see="torch_npu is not installed",
        )
    if not seen.torch_works or seen.torch_build is not None:
        return not_checked(f"{package.version}, but torch does not work with it: see torch above")
    if not seen.torch_npu_works:
        return _without_cann(seen) or _failed(seen, seen.torch)
    if unfit:
        return warning(f"{package.version} {unfit}", advice=FIT, commands=_install(seen))
    return ok(seen.torch.facts["torch_npu"])


def facts(seen: Observations) -> dict[str, Any]:
    """Return the version of torch_npu, and the errors of its import."""
    version = seen.packages[NAME].version
    return {"version": version and str(version), "errors": seen.torch.errors}


def _without_cann(seen: Observations) -> Finding | None:
    """Judge torch_npu by the software device where nothing points to a card; None where that says nothing.

    CANN's libraries are to be missing there.
    """
    if not seen.only_cann_is_missing or seen.expects_a_card or seen.use is None:
        return None
    version = seen.packages[NAME].version
    if seen.runs_on_software:
        alone = f"alone it ends in {seen.torch.cause}: there is no CANN here"
        return ok(f"{version}, on the software device", details=(alone,))
    if seen.software_failed_by_itself:
        return not_checked(f"{version}; the software device does not start: see device")
    # with CANN's libraries it comes further, and says what else is missing
    return _failed(seen, seen.use) if seen.use.failure else None


def _failed(seen: Observations, outcome: Outcome) -> Finding:
    version, unfit = seen.packages[NAME].version, _unfit(seen)
    told = explained(outcome.errors, UNKNOWN, _install(seen))
    if outcome.hung:
        told |= {"advice": HUNG, "commands": ()}
    elif unfit:
        told |= {"advice": FIT, "commands": _install(seen)}
    elif told["see"] == WRONG_BUILD:
        told["commands"] = (cpu_build(seen),)
    elif seen.only_cann_is_missing and seen.expects_a_card and not (seen.named_cann and seen.named_cann["exists"]):
        told |= {"advice": "See CANN below.", "commands": ()}
    elif seen.only_cann_is_missing and seen.cann_scripts:
        told |= {"advice": SOURCE, "commands": seen.cann_scripts}
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
    package, found = seen.packages[NAME], seen.torch.facts.get("torch")
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
