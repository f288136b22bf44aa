"""Checks the card, finds out why there is none, or checks the software device in its place."""

from __future__ import annotations

from typing import Any

from kernels_ext_npu.doctor.findings import Finding, not_checked, ok, problem
from kernels_ext_npu.doctor.known_errors import explained
from kernels_ext_npu.doctor.observations import Observations
from kernels_ext_npu.doctor.probes.imports import DEVICES
from kernels_ext_npu.doctor.probes.tiny_model import DEVICE, SOFTNPU

INVISIBLE = "none visible to torch_npu"
VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
DRIVER = "The driver does not answer as it should. Look at what its tool says, and ask who looks after the machine."
NODES = (
    "There are no device nodes. In a container pass them in, with docker: --device /dev/davinci0 --device "
    "/dev/davinci_manager --device /dev/devmm_svm --device /dev/hisi_hdc, and mount /usr/local/Ascend/driver. On the "
    "host install or load the driver."
)
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


def facts(seen: Observations) -> dict[str, Any]:
    """Return how many devices there are, and every sign of one."""
    return {
        "count": seen.devices,
        "names": seen.torch.facts.get("names", []),
        "software": seen.software,
        "signs": seen.signs_of_hardware,
        VISIBLE: seen.environment.get(VISIBLE),
        "npu_smi": seen.disk.facts.get("npu_smi"),
    }


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
