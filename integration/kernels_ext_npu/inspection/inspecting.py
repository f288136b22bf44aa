"""Inspects a model: which kernel serves which of its modules, and what that changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch._subclasses import FakeTensorMode
from transformers import PreTrainedModel

import kernels_ext_npu
from kernels_ext_npu.catalogue import REPOSITORIES
from kernels_ext_npu.environment import first_line
from kernels_ext_npu.inspection import remarks as remark
from kernels_ext_npu.inspection.counting.counts import Counts
from kernels_ext_npu.inspection.counting.dispatch import Counting
from kernels_ext_npu.inspection.counting.known_values import KnownValues, UnknownValueError
from kernels_ext_npu.inspection.counting.memory import parameter_count, weight_bytes
from kernels_ext_npu.inspection.counting.phases import DECODING, GROWING, count
from kernels_ext_npu.inspection.four_bit_layers import quantise
from kernels_ext_npu.inspection.mesh import ONE, Mesh, distributed
from kernels_ext_npu.inspection.mesh import remarks as remarks_on_mesh
from kernels_ext_npu.inspection.subject import (
    CannotInspectError,
    Subject,
    adapt,
    build,
    check_decodes,
    clamp,
    labels,
    make_inputs,
)
from kernels_ext_npu.measuring.roofline import Soc
from kernels_ext_npu.reporting.report import Report

_FIRST = ("forward", GROWING)  # in this phase modules that are not called are remarked
ORIGINAL, ALL = "original", "with kernels"
PHASES = {"forward": "forward, no gradients", "step": "training step: forward and backward"}
WHOLE = {  # a whole step of training, in its order
    "training_forward": "forward",
    "backward": "backward",
    "clipping": "clipping",
    "optimizer": "optimizer",
}
UPDATE = {  # what follows a backward, and is none of the kernels'
    "clipping": "gradient clipping: clip_grad_norm_, in lists",
    "optimizer": "optimizer: a step of AdamW, in lists",
}


@dataclass
class KernelSet:
    """A model with some of the kernels."""

    name: str  # the original, one kernel alone, or with kernels
    swapped: str = "nothing"  # how many modules of each kind are swapped, in words
    # what each phase costs; None for what cannot be counted
    counts: dict[str, Counts | None] = field(default_factory=dict)


@dataclass
class Inspection:
    """The result of inspecting a model."""

    subject: Subject  # what was inspected
    inputs: str  # what the model was given, in words
    dtype: str  # the dtype of the weights, such as bfloat16
    soc: Soc  # the chip of estimate and roofline
    mesh: Mesh  # the mesh of ranks, one of which was counted
    parameters: int  # the number of parameters
    weights: int  # the bytes of the weights that a rank holds
    report: Report  # the modules, and the kernels that serve them
    kernel_sets: list[KernelSet]  # the original first, all kernels last
    remarks: list[str]  # what a reader of the figures has to know
    # what was counted, by the names in the counts of the kernel sets, in words
    phases: dict[str, str] = field(default_factory=lambda: PHASES)

    @property
    def ends(self) -> tuple[KernelSet, KernelSet]:
        """The original, and the model with all kernels."""
        return self.kernel_sets[0], self.kernel_sets[-1]

    def product_ratio(self, phase: str, counts: Counts) -> float | None:
        """Return how many times its products and attention a phase takes, those of the one of the ends with fewer.

        A product more than needed counts against who computes it. None where there is none, or none was counted.
        """
        counted = [whole(v) if phase == "whole_step" else v.counts[phase] for v in self.ends]
        products = min((counts.products for counts in counted if counts is not None), default=None)
        return counts.roofline / products if products else None


def inspect(
    subject: Subject,
    soc: Soc,
    dtype: torch.dtype = torch.bfloat16,
    batch: int = 1,
    tokens: int = 4096,
    compare: bool = False,
    advance: Callable[[str], None] = lambda _: None,
    mesh: Mesh = ONE,
    checkpointing: bool = False,
    lora: int = 0,
    nf4: bool = False,
    update: bool = False,
    decode: bool = False,
) -> Inspection:
    """Build the model on fake tensors, and count it with and without kernels.

    Args:
        compare: count each kernel alone, too.
        advance: is called with what comes next.
        mesh: count one of these ranks.
        checkpointing: keep the inputs of layers alone for the backward, and compute the rest of them again there.
        lora: the rank of adapters of all linear layers but the head, which alone are trained then; none with 0.
        nf4: keep the weights of these layers in four bits, as bitsandbytes does.
        update: count a whole step, too, phase by phase: forward, backward, gradient clipping and the optimiser's step.
        decode: count steps of decoding behind these tokens, in place of a forward and a training step.

    Raises:
        CannotInspectError: the model cannot be built or sharded, or nothing of it can be counted.
    """
    values, remarks = KnownValues(), list(subject.remarks)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # models warn about inputs that mean nothing
        advance("building the model")
        with fake:
            model = _build(subject, dtype, values, soc)
            adapted = quantise(model) if nf4 else ""
            adapted += adapt(model, lora) if lora else ""
        size = parameter_count(model)
        with distributed(model, mesh) as axes, fake:
            inputs, described = make_inputs(model, batch, clamp(model, tokens, remarks), values, mesh.cp)
            described += adapted
            remarks += remarks_on_mesh(model, mesh)
            phases = DECODING if decode else PHASES | (WHOLE | UPDATE if update else {})
            if decode:
                check_decodes(model)
                described += ", and one more a row"
            if checkpointing:
                described += _checkpoint(model)
            kernel_sets, report = [], Report([])
            alone = [(f"{name} alone", (name,)) for name in REPOSITORIES] if compare else []
            for name, kernels in [(ORIGINAL, ()), *alone, (ALL, REPOSITORIES)]:
                with _swapped(model, kernels) as found:
                    kernel_set = KernelSet(name)
                    if found is not None:
                        report, kernel_set.swapped = found, found.summary()
                    for phase, title in phases.items():
                        advance(f"{name}: {title}")
                        given = inputs | labels(model, inputs, mesh.cp) if phase in ("step", *WHOLE) else inputs
                        counter = partial(count, phase, model, given, values, soc, axes)
                        with remark.idle(model, remarks if phase in _FIRST and found is None else []):
                            kernel_set.counts[phase] = _count(model, counter, f"{name}, {phase}", remarks)
                    kernel_sets.append(kernel_set)
            weights = weight_bytes(model)
    counted = [counts for kernel_set in kernel_sets for counts in kernel_set.counts.values() if counts is not None]
    if not counted:
        raise CannotInspectError(f"{subject.name}: nothing could be counted. " + "; ".join(dict.fromkeys(remarks)))
    unknown = remark.unknown_products({name for each in counted for name in each.launches})
    remarks = [*dict.fromkeys(remarks), *unknown, *remark.not_read(counted)]
    name = str(dtype).removeprefix("torch.")
    return Inspection(subject, described, name, soc, mesh, size, weights, report, kernel_sets, remarks, phases)


def whole(kernel_set: KernelSet, phases: Collection[str] = tuple(WHOLE)) -> Counts | None:
    """Add up the phases of a whole step, or some; the peak is the largest of theirs. None where one was not counted."""
    total = Counts()
    for phase in phases:
        counts = kernel_set.counts.get(phase)
        if counts is None:
            return None
        peak = max(total.peak, counts.peak)
        total.add(counts)
        total.peak = peak
    return total


def _build(subject: Subject, dtype: torch.dtype, values: KnownValues, soc: Soc) -> PreTrainedModel:
    try:
        with Counting(values, soc):  # for the values of its buffers
            return build(subject, dtype)
    except Exception as error:  # sizes that do not fit together, say
        raise CannotInspectError(
            f"{subject.name}: no {subject.model_class.__name__} can be built of it: {first_line(error)}"
        ) from error


def _checkpoint(model: PreTrainedModel) -> str:
    """Let a model compute its layers again in the backward, and return what to say of it."""
    if not model.supports_gradient_checkpointing:
        raise CannotInspectError(f"--checkpointing: {type(model).__name__} has no gradient checkpointing")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return ", with gradient checkpointing"


@contextmanager
def _swapped(model: PreTrainedModel, kernels: tuple[str, ...]) -> Iterator[Report | None]:
    """Put these kernels into a model while the context is open, and give the report; None where there are none."""
    if not kernels:
        yield None
        return
    kernels_ext_npu.register(kernels=kernels)
    try:
        kernels_ext_npu.kernelize(model)
        yield kernels_ext_npu.report(model)
        kernels_ext_npu.restore(model)
    finally:
        kernels_ext_npu.unregister()


def _count(model: PreTrainedModel, count: Callable[[], Counts], what: str, remarks: list[str]) -> Counts | None:
    """Count one phase; what cannot be counted is remarked and gives None, and the rest goes on."""
    try:
        return count()
    except Exception as error:  # raised by a model's own code, for inputs that it was not made for
        why = f"ended in {type(error).__name__}: {first_line(error)}"
        if isinstance(error, UnknownValueError):
            why = (
                f"lets the host read what follows from weights or chance, by {error}; each time it waits for the device"
            )
        remarks.append(f"{what}: not counted, since {remark.culprit(model, error)} {why}")
    model.zero_grad(set_to_none=True)
    return None
