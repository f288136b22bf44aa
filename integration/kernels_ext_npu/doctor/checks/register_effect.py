"""Checks whether register() takes effect: what happened when kernels were swapped into a tiny model."""

from __future__ import annotations

from kernels_ext_npu.doctor.findings import Finding, not_checked, ok, problem, remedy, warning
from kernels_ext_npu.doctor.observations import Observations
from kernels_ext_npu.doctor.probes import DEVICE, KERNELS, SOFTNPU, TORCH_NPU, TRANSFORMERS

HUNG = "Look whether another process holds the device, and whether the Hub answers where the kernels come from there."


def register_takes_effect(seen: Observations) -> Finding:
    """Check that `register()` takes effect on a tiny model."""
    outcome = seen.use
    if outcome is None:
        return not_checked("the device, or a package, does not work: see above")
    found = outcome.facts
    where = "on the software device" if seen.software else f"on {found.get('device', 'the NPU')}"
    by_device = outcome.step == SOFTNPU or (
        outcome.step in (TORCH_NPU, DEVICE) and seen.software and not seen.expects_a_card
    )
    if outcome.failure and (by_device or outcome.step in (KERNELS, TRANSFORMERS)):  # findings of these tell of it
        return not_checked(f"{outcome.step} fails: see above")
    if (missing := seen.missing(outcome)) is not None:
        return not_checked(f"{missing} is not installed: see above")
    if outcome.failure:
        otherwise = HUNG if outcome.hung else "The JSON report (--json) has what was printed."
        return outcome.problem(f"{outcome.step}, {where}: {outcome.cause}", otherwise)
    if "kept" not in found:
        return not_checked(f"everything else works {where}, but the Hub cannot be reached")
    if not found["agrees"]:
        return problem(
            f"a tiny model with kernels computes something else, {where}",
            details=(f"largest difference of a logit, relative: {found['difference']:.1e}",),
            **remedy("other results"),
        )
    if found["kept"]:
        return warning(
            f"took effect {where}, but not everywhere: {found['summary']}",
            details=tuple(found["kept"][:4]),
            **remedy("not everywhere"),
        )
    variants = sorted({folder.rpartition("/")[2] for folder in found["taken"].values()})
    loaded = f"loaded the variant {', '.join(variants)} of {', '.join(sorted(found['taken']))}"
    return ok(f"takes effect {where}: {found['summary']}, and the results agree", details=(loaded,))
