"""Checks the card, finds out why there is none, or checks the software device in its place."""

from __future__ import annotations

from typing import Any

from kernels_ext_npu.doctor import use_probe
from kernels_ext_npu.doctor.findings import Finding, not_checked, ok, problem
from kernels_ext_npu.doctor.known_errors import explain
from kernels_ext_npu.doctor.observations import Observations
from kernels_ext_npu.doctor.torch_probe import DEVICES

NAME, INVISIBLE = "device", "none visible to torch_npu"
VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"


def device(seen: Observations) -> Finding:
    """Check that there are NPUs, or the software device in their place."""
    facts = {
        "count": seen.devices,
        "names": seen.torch.facts.get("names", []),
        "software": seen.software,
        "signs": seen.signs_of_hardware,
        VISIBLE: seen.environment.get(VISIBLE),
        "npu_smi": seen.disk.facts.get("npu_smi"),
    }
    if seen.devices:
        return _visible(seen, facts)
    if seen.torch_npu_works or seen.torch.step == DEVICES:
        return _none_visible(seen, facts)
    if seen.signs_of_hardware:
        return _unreachable(seen, facts)
    if seen.expects_a_card:
        return problem(
            NAME,
            "no sign of a card, but CANN is set up or installed",
            details=_software_details(seen),
            advice="If this machine is to have a card, give it one: the driver, and in a container the device nodes. "
            "If not, unset the variables that begin with ASCEND_, and work on the software device: `import softnpu`.",
            see=INVISIBLE,
            facts=facts,
        )
    return _software(seen, facts)


def _visible(seen: Observations, facts: dict[str, Any]) -> Finding:
    names = facts["names"]
    found = f"{seen.devices} × {names[0]}" if names else f"{seen.devices} found, which do not tell their names"
    details = (f"{VISIBLE}={facts[VISIBLE]}, of {len(seen.nodes)}",) if facts[VISIBLE] and seen.nodes else ()
    npu_smi = facts["npu_smi"]
    if npu_smi and not npu_smi["answers"]:
        details = (*details, f"but {npu_smi['program']}: {npu_smi['said']}")
    return ok(NAME, found, details=details, facts=facts)


def _none_visible(seen: Observations, facts: dict[str, Any]) -> Finding:
    """Say why torch_npu can be imported, and finds no device."""
    details = [f"there is {sign}" for sign in seen.signs_of_hardware]
    chosen, npu_smi = facts[VISIBLE], facts["npu_smi"]
    if seen.torch.failure:
        details.append(seen.torch.failure.splitlines()[0])
    if npu_smi and not npu_smi["answers"]:
        details.append(f"npu-smi info: {npu_smi['said']}")
    if chosen is not None:
        advice, commands = (
            f"{VISIBLE}={chosen} lets no device be seen: unset it, or name devices.",
            (f"unset {VISIBLE}",),
        )
    elif seen.disk.facts.get("closed"):
        return _closed(seen, facts)
    elif npu_smi and not npu_smi["answers"]:
        advice, commands = DRIVER, ("npu-smi info",)
    elif not seen.nodes:
        advice, commands = NODES, ("ls -l /dev/davinci*",)
    else:
        known = explain(seen.torch.errors)
        advice = known.advice if known else DRIVER
        commands = ("npu-smi info",)
    return problem(
        NAME,
        "none visible to torch_npu",
        details=tuple(details),
        advice=advice,
        commands=commands,
        see=INVISIBLE,
        facts=facts,
    )


DRIVER = "The driver does not answer as it should. Look at what its tool says, and ask who looks after the machine."
NODES = (
    "There are no device nodes. In a container pass them in, with docker: --device /dev/davinci0 --device "
    "/dev/davinci_manager --device /dev/devmm_svm --device /dev/hisi_hdc, and mount /usr/local/Ascend/driver. On the "
    "host install or load the driver."
)


def _unreachable(seen: Observations, facts: dict[str, Any]) -> Finding:
    """Say why torch_npu cannot be asked, though there is a card or a driver."""
    signs = [f"there is {sign}" for sign in seen.signs_of_hardware]
    if seen.disk.facts.get("closed"):
        return _closed(seen, facts)
    npu_smi = facts["npu_smi"]
    if npu_smi and not npu_smi["answers"]:
        return problem(
            NAME,
            f"npu-smi info: {npu_smi['said']}",
            details=tuple(signs),
            advice=DRIVER,
            commands=("npu-smi info",),
            see=INVISIBLE,
            facts=facts,
        )
    if not seen.nodes:
        return problem(
            NAME,
            "a card is meant to be here, but there is no /dev/davinci*",
            details=tuple(signs),
            advice=NODES,
            commands=("ls -l /dev/davinci*",),
            see=INVISIBLE,
            facts=facts,
        )
    return not_checked(NAME, f"torch_npu cannot be asked; there is {'; '.join(seen.signs_of_hardware)}", facts=facts)


def _closed(seen: Observations, facts: dict[str, Any]) -> Finding:
    return problem(
        NAME,
        f"{', '.join(seen.disk.facts['closed'])} may not be opened by this user",
        advice="Join the group of the device nodes, HwHiAiUser on most machines, and log in again.",
        commands=("ls -l /dev/davinci*", 'sudo usermod -a -G HwHiAiUser "$USER"'),
        see=INVISIBLE,
        facts=facts,
    )


def _software(seen: Observations, facts: dict[str, Any]) -> Finding:
    """Check the software device, where there is neither a card nor a sign of one."""
    tried = seen.use is not None and (seen.use.passed(use_probe.SOFTNPU) or seen.software_failed_by_itself)
    if seen.use is None or not tried:
        return not_checked(NAME, "no NPU here, and torch_npu does not work with the software device", facts=facts)
    if seen.use.passed(use_probe.DEVICE):
        return ok(
            NAME,
            "no NPU here: the software device is used",
            details=("right for development and tests; it says nothing about speed",),
            facts=facts,
        )
    known = explain(seen.use.errors)
    said = seen.use.errors[0].splitlines()[0] if seen.software_failed_by_itself else seen.use.cause
    return problem(
        NAME,
        f"no NPU here, and no software device: {said}",
        details=(known.meaning,) if known else (),
        advice=known.advice if known else "Look at the error.",
        commands=known.commands if known else (),
        see=known.see if known else None,
        facts=facts | {"errors": seen.use.errors, "output": seen.use.output},
    )


def _software_details(seen: Observations) -> tuple[str, ...]:
    if seen.use is not None and seen.use.passed(use_probe.DEVICE) and seen.software:
        return ("the software device works here",)
    return ()
