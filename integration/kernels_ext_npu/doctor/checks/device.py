"""Checks CANN and the card, finds out why one is not there, or checks the software device in their place."""

from __future__ import annotations

import re

from kernels_ext_npu import environment
from kernels_ext_npu.doctor.findings import NO_CANN, SET_ENV, Finding, explained, not_checked, ok, problem, warning
from kernels_ext_npu.doctor.observations import SOFTWARE_CANN, Observations, scripts
from kernels_ext_npu.doctor.probes import CANN, DEVICE, DEVICES, SOFTNPU
from kernels_ext_npu.machine.cann_releases import release_of, sentences

INVISIBLE = "none visible to torch_npu"
VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
DRIVER = "The driver does not answer as it should. Look at what its tool says, and ask who looks after the machine."
NODES = (
    "There are no device nodes. In a container pass them in, with docker: --device /dev/davinci0 --device "
    "/dev/davinci_manager --device /dev/devmm_svm --device /dev/hisi_hdc, and mount /usr/local/Ascend/driver. On the "
    "host install or load the driver."
)
UNREADABLE = "InvalidVersion: Invalid version"
ASK_DRIVER, LIST_NODES = ("npu-smi info",), ("ls -l /dev/davinci*",)


def device(seen: Observations) -> Finding:
    """Check that there are NPUs, or the software device in their place."""
    if seen.devices:
        return _visible(seen)
    asked = seen.torch_npu_works or seen.torch.step == DEVICES
    chosen, signs = seen.environment.get(VISIBLE), tuple(f"there is {sign}" for sign in seen.signs_of_hardware)
    if asked and chosen is not None:
        advice = f"{VISIBLE}={chosen} lets no device be seen: unset it, or name devices."
        return _none(INVISIBLE, (*signs, *_failures(seen)), advice, (f"unset {VISIBLE}",))
    if (asked or signs) and seen.disk.facts.get("closed"):
        closed = f"{', '.join(seen.disk.facts['closed'])} may not be opened by this user"
        advice = "Join the group of the device nodes, HwHiAiUser on most machines, and log in again."
        return _none(closed, (), advice, (*LIST_NODES, 'sudo usermod -a -G HwHiAiUser "$USER"'))
    if asked and (seen.driver_failure or seen.nodes):
        advice = DRIVER if seen.driver_failure else explained(seen.torch.errors, DRIVER)["advice"]
        return _none(INVISIBLE, (*signs, *_failures(seen)), advice, ASK_DRIVER)
    if asked:
        return _none(INVISIBLE, (*signs, *_failures(seen)), NODES, LIST_NODES)
    if signs and seen.driver_failure:
        return _none(f"npu-smi info: {seen.driver_failure}", signs, DRIVER, ASK_DRIVER)
    if signs and not seen.nodes:
        return _none("a card is meant to be here, but there is no /dev/davinci*", signs, NODES, LIST_NODES)
    if signs:
        return not_checked(f"torch_npu cannot be asked; there is {'; '.join(seen.signs_of_hardware)}")
    if seen.expects_a_card:
        works = seen.use is not None and seen.use.passed(DEVICE) and seen.software
        advice = (
            "If this machine is to have a card, give it one: the driver, and in a container the device nodes. If not, "
            "unset the variables that begin with ASCEND_, and work on the software device: `import softnpu`."
        )
        details = ("the software device works here",) if works else ()
        return _none("no sign of a card, but CANN is set up or installed", details, advice)
    return _software(seen)


def _visible(seen: Observations) -> Finding:
    names, chosen = seen.torch.facts.get("names"), seen.environment.get(VISIBLE)
    found = f"{seen.devices} × {names[0]}" if names else f"{seen.devices} found, which do not tell their names"
    details = [f"{VISIBLE}={chosen}, of {len(seen.nodes)}"] if chosen and seen.nodes else []
    if seen.driver_failure:
        details.append(f"but {seen.disk.facts['npu_smi']['program']}: {seen.driver_failure}")
    return ok(found, details=tuple(details))


def _none(summary: str, details: tuple[str, ...], advice: str, commands: tuple[str, ...] = ()) -> Finding:
    return problem(summary, details=details, advice=advice, commands=commands, see=INVISIBLE)


def _failures(seen: Observations) -> list[str]:
    """List how torch_npu failed where it counted devices, and the driver's tool."""
    failures = [seen.torch.failure.splitlines()[0]] if seen.torch.failure else []
    return failures + ([f"npu-smi info: {seen.driver_failure}"] if seen.driver_failure else [])


def _software(seen: Observations) -> Finding:
    """Check the software device, where there is neither a card nor a sign of one."""
    if seen.use is None or not (seen.use.passed(SOFTNPU) or seen.software_failed_by_itself):
        return not_checked("no NPU here, and torch_npu does not work with the software device")
    if seen.use.passed(DEVICE):
        details = ("right for development and tests; it says nothing about speed",)
        return ok("no NPU here: the software device is used", details=details)
    said = seen.use.errors[0].splitlines()[0] if seen.software_failed_by_itself else seen.use.cause
    facts = {"errors": seen.use.errors, "output": seen.use.output}
    return problem(f"no NPU here, and no software device: {said}", **explained(seen.use.errors), facts=facts)


def cann(seen: Observations) -> Finding:
    """Check which CANN is there, where, and how `kernels` reads its version."""
    named, places = seen.named_cann, seen.cann_places
    if seen.torch.hung and seen.torch.step == CANN:
        return problem(
            "torch_npu reads its version without an end",
            advice="It looks through every folder below ASCEND_HOME_PATH or, where that is not set, below the current "
            "folder. Source the script of CANN.",
            commands=seen.cann_scripts or SET_ENV,
        )
    if named is not None and not named["exists"]:
        return problem(
            f"ASCEND_HOME_PATH is {named['path']}, which is no folder",
            advice="Source the script of the CANN that is installed; without one, unset ASCEND_HOME_PATH.",
            commands=seen.cann_scripts or SET_ENV,
            see="ASCEND_OPP_PATH environment variable is not set",
        )
    if named is None and places and not seen.torch_npu_works:
        versions = ", ".join(dict.fromkeys(place["version"] for place in places))
        return problem(
            f"{versions} on disk, but its environment is not set up",
            details=tuple(f"{place['version']} in {place['path']}" for place in places),
            advice="Source its script in the shell that starts Python, or in the script of the job.",
            commands=scripts(places[:1]) or seen.cann_scripts or SET_ENV,
            see=NO_CANN,
        )
    return _absent(seen) if seen.cann is None and named is None else _read(seen)


def as_kernels_reads(found: str) -> str | None:
    """Return the first and the third character, as `kernels` does; None where these make no version."""
    characters = found[:3]
    return f"{characters[0]}.{characters[2]}" if re.fullmatch(r"\d.\d", characters) else None


def _read(seen: Observations) -> Finding:
    named = seen.named_cann
    found = seen.cann or "not known"  # what torch_npu makes of a folder without a file that names it
    place = f" in {named['path']}" if named else ""
    refusal = environment.refuse_cann(found)
    if refusal is not None:
        unknown = not re.match(r"\d", found)
        readable = [other for other in seen.cann_places if environment.refuse_cann(other["version"]) is None]
        return problem(
            f"version {f'unknown ({found!r})' if unknown else found}{place}, and kernels cannot read it",
            details=(f"it is read from {named['info']}",) if named and named["info"] else (),
            advice=refusal,
            commands=(scripts(readable) or SET_ENV) if unknown else (),
            see=UNREADABLE,
        )
    read, true = as_kernels_reads(found), re.match(r"(\d+)\.(\d+)", found)
    if read and true and read != f"{int(true[1])}.{int(true[2])}":
        return warning(
            f"{found}{place}, which kernels reads as {read}",
            advice=f"kernels takes single digits, and would take a variant for CANN {read}. "
            "The variants torch-npu and torch-universal fit every CANN.",
            see=UNREADABLE,
        )
    return ok(f"{found}{place}; kernels reads {read}", details=tuple(sentences(release_of(found))))


def _absent(seen: Observations) -> Finding:
    if seen.disk.failure:
        return not_checked(f"its files could not be read: {seen.disk.failure}")
    if seen.expects_a_card:
        return problem(
            "not found: ASCEND_HOME_PATH is not set, and it is in none of its usual folders",
            advice="Install CANN, or source the script of the one that is installed elsewhere.",
            commands=SET_ENV,
            see=NO_CANN,
        )
    if seen.software:
        less = tuple(sentences(release_of(SOFTWARE_CANN)))
        return ok(f"none, and none is needed: the software device stands for {SOFTWARE_CANN}", details=less)
    return not_checked("none found; the software device needs none")
