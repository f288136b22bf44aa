"""Checks whether register() takes effect: what happened when kernels were swapped into a tiny model."""

from __future__ import annotations

from kernels_ext_npu.doctor import use_probe
from kernels_ext_npu.doctor.findings import Finding, not_checked, ok, problem, warning
from kernels_ext_npu.doctor.known_errors import explain
from kernels_ext_npu.doctor.observations import Observations

NAME = "register()"
EARLIER = (use_probe.SOFTNPU, use_probe.TORCH_NPU, use_probe.DEVICE, use_probe.KERNELS, use_probe.TRANSFORMERS)


def usage(seen: Observations) -> Finding:
    """Check that `register()` takes effect on a tiny model."""
    outcome = seen.use
    if outcome is None:
        return not_checked(NAME, "the device, or a package, does not work: see above")
    where = "on the software device" if seen.software else f"on {outcome.facts.get('device', 'the NPU')}"
    facts = {name: outcome.facts.get(name) for name in ("software", "device", "summary", "kept", "difference", "taken")}
    if outcome.failure and outcome.step in EARLIER and _told_elsewhere(seen):
        return not_checked(NAME, f"{outcome.step} fails: see above", facts=facts)
    if (missing := seen.missing(outcome)) is not None:
        return not_checked(NAME, f"{missing} is not installed: see above", facts=facts)
    if outcome.failure:
        known = explain(outcome.errors)
        return problem(
            NAME,
            f"{outcome.step}, {where}: {outcome.cause}",
            details=(known.meaning,) if known else (),
            advice=known.advice
            if known
            else HUNG
            if outcome.hung
            else "The JSON report (--json) has what was printed.",
            commands=known.commands if known else (),
            see=known.see if known else None,
            facts=facts | {"failure": outcome.failure, "errors": outcome.errors, "output": outcome.output},
        )
    if "kept" not in outcome.facts:
        return not_checked(NAME, f"everything else works {where}, but the Hub cannot be reached", facts=facts)
    kept = outcome.facts["kept"]
    if not outcome.facts["agrees"]:
        return problem(
            NAME,
            f"a tiny model with kernels computes something else, {where}",
            details=(f"largest difference of a logit, relative: {outcome.facts['difference']:.1e}",),
            advice="Do not use the kernels here. `kernels-ext-npu demo` compares more models; please report both.",
            commands=("kernels-ext-npu demo",),
            facts=facts,
        )
    if kept:
        return warning(
            NAME,
            f"took effect {where}, but not everywhere: {outcome.facts['summary']}",
            details=tuple(kept[:4]),
            advice="This model should be served completely. Look whether something else changes transformers.",
            facts=facts,
        )
    return ok(
        NAME,
        f"takes effect {where}: {outcome.facts['summary']}, and the results agree",
        details=tuple(_taken(outcome.facts["taken"])),
        facts=facts,
    )


HUNG = "Look whether another process holds the device, and whether the Hub answers where the kernels come from there."


def _taken(taken: dict[str, str]) -> list[str]:
    """Say in one line which variants of which kernels were loaded."""
    variants = {folder.rpartition("/")[2] for folder in taken.values()}
    return [f"loaded the variant {', '.join(sorted(variants))} of {', '.join(sorted(taken))}"]


def _told_elsewhere(seen: Observations) -> bool:
    """Tell whether another finding tells of what failed before register().

    That is the finding of the device, of torch_npu, of kernels or of transformers.
    """
    assert seen.use is not None
    by_device = seen.use.step == use_probe.SOFTNPU or (seen.software and not seen.expects_a_card)
    return by_device or seen.use.step in (use_probe.KERNELS, use_probe.TRANSFORMERS)
