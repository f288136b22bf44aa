"""Checks torch_npu: whether it is installed, can be imported and is for this torch, and what its errors mean."""

from __future__ import annotations

from packaging.version import Version

from kernels_ext_npu.doctor.findings import Finding, not_checked, ok, problem, warning
from kernels_ext_npu.doctor.known_errors import explain
from kernels_ext_npu.doctor.observations import Observations
from kernels_ext_npu.doctor.probing import Outcome
from kernels_ext_npu.doctor.stack import WRONG_BUILD, cpu_build, wanted_torch

NAME = "torch_npu"
FIT = "Install the releases of torch and torch_npu that belong together; torch_npu names its torch in its own metadata."
SOURCE = "CANN is on this machine: source its script in the shell that starts Python, or in the script of the job."
HUNG = (
    "Its import does not end. Look whether the driver answers (npu-smi info), whether ASCEND_HOME_PATH lies on a slow "
    "disk, and start Python with `-X importtime` to see where it stays."
)


def torch_npu(seen: Observations) -> Finding:
    """Check that torch_npu is installed, can be imported, and is for this torch."""
    package = seen.packages[NAME]
    facts = {"version": package.version and str(package.version), "errors": seen.torch.errors}
    if not package.installed:
        return problem(
            NAME,
            "not installed",
            advice="Install the release that fits torch and CANN: with --no-deps, or pip may take another torch. The "
            "software device runs on it too.",
            commands=_install(seen),
            see="torch_npu is not installed",
            facts=facts,
        )
    if not seen.torch_works or seen.torch_build is not None:
        return not_checked(NAME, f"{package.version}, but torch does not work with it: see torch above", facts=facts)
    if not seen.torch_npu_works:
        return _without_cann(seen, facts) or _failed(seen, seen.torch, facts)
    unfit = _unfit(seen)
    if unfit:
        return warning(NAME, f"{package.version} {unfit}", advice=FIT, commands=_install(seen), facts=facts)
    return ok(NAME, seen.torch.facts["torch_npu"], facts=facts)


def _without_cann(seen: Observations, facts: dict) -> Finding | None:
    """Judge torch_npu by the software device where nothing points to a card; None where that says nothing.

    CANN's libraries are to be missing there.
    """
    if not seen.only_cann_is_missing or seen.expects_a_card or seen.use is None:
        return None
    version = seen.packages[NAME].version
    if seen.runs_on_software:
        alone = f"alone it ends in {seen.torch.cause}: there is no CANN here"
        return ok(NAME, f"{version}, on the software device", details=(alone,), facts=facts)
    if seen.software_failed_by_itself:
        return not_checked(NAME, f"{version}; the software device does not start: see device", facts=facts)
    # with CANN's libraries it comes further, and says what else is missing
    return _failed(seen, seen.use, facts) if seen.use.failure else None


def _failed(seen: Observations, outcome: Outcome, facts: dict) -> Finding:
    known, unfit = explain(outcome.errors), _unfit(seen)
    details = [known.meaning] if known else []
    if seen.only_cann_is_missing and seen.runs_on_software:
        details.append("the software device has them: it works here")
    if unfit:
        details.append(f"{seen.packages[NAME].version} {unfit}")
    scripts = tuple(dict.fromkeys(f"source {place['set_env']}" for place in seen.cann_places if place["set_env"]))
    commands: tuple[str, ...] = ()
    if outcome.hung:
        advice = HUNG
    elif unfit:
        advice, commands = FIT, _install(seen)
    elif known and known.see == WRONG_BUILD:
        advice, commands = known.advice, (cpu_build(seen),)
    elif seen.only_cann_is_missing and seen.expects_a_card and _cann_is_told(seen):
        advice = "See CANN below."
    elif seen.only_cann_is_missing and scripts:
        advice, commands = SOURCE, scripts
    elif known:
        advice, commands = known.advice, known.commands
    else:
        advice, commands = "Look at the error, and install torch_npu again in the release that fits.", _install(seen)
    return problem(
        NAME,
        f"{seen.packages[NAME].version} cannot be imported: {outcome.cause}",
        details=tuple(details),
        advice=advice,
        commands=commands,
        see=known.see if known else None,
        facts=facts | {"failure": outcome.failure, "output": outcome.output},
    )


def _install(seen: Observations) -> tuple[str, ...]:
    torch = seen.packages["torch"].version
    return (
        f"pip install --no-deps torch_npu=={torch.base_version if torch else wanted_torch(seen)}",
        "pip install numpy pyyaml",
    )


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


def _cann_is_told(seen: Observations) -> bool:
    """Tell whether CANN is a problem of its own: not there, or not set up."""
    named = seen.disk.facts.get("ASCEND_HOME_PATH")
    return named is None or named["software"] or not named["exists"]
