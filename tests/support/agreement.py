"""Compare whole models with the CPU: outputs, gradients and generated tokens."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import kernels_ext_npu
from kernels_ext_npu.catalogue import ATTENTION
from tests.support import zoo
from tests.support.attention_types import kept, seen

# float32 through up to a few dozen operations a layer, relative to the norm of the result
TOLERANCE = 1e-5


def assert_agrees(name: str, model: PreTrainedModel) -> float:
    """Compare a model of the zoo that is on the NPU with the same model on the CPU; returns the largest difference.

    Where the attention is ours the other one's is eager: transformers' sdpa takes masks that are added to scores for
    boolean ones wherever torch_npu is. Rows that see no key mean nothing, and are not compared.
    """
    reference = zoo.build(name)
    is_ours = any(row.swapped and row.kind == ATTENTION.in_models for row in kernels_ext_npu.report(model))
    if is_ours:
        reference.set_attn_implementation("eager")
    inputs = zoo.inputs(name, reference)
    rows = seen(reference, inputs) if is_ours else {}
    moved = zoo.inputs(name, model)
    expected, found = reference(**inputs), model(**moved)
    largest = 0.0
    expected, found = ([kept(tensor, rows) for tensor in zoo.tensors(outputs)] for outputs in (expected, found))
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        difference = _distance(a, b)
        assert difference <= TOLERANCE  # of itself: max() loses what is not a number
        largest = max(largest, difference)

    zoo.loss(expected).backward()
    zoo.loss(found).backward()
    largest = max(largest, assert_gradients_near(gradients(model), gradients(reference)))

    if zoo.can_generate(name):
        options = {"max_new_tokens": 4, "do_sample": False}
        assert torch.equal(model.generate(**moved, **options).cpu(), reference.generate(**inputs, **options))
    return largest


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of the parameters that have one, by name."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients_near(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = TOLERANCE
) -> float:
    """Compare each gradient relative to the norm of all: some are all but zero. Returns the largest difference."""
    assert found.keys() == expected.keys()
    whole = torch.stack([gradient.double().norm().cpu() for gradient in expected.values()]).norm().item()
    apart = {name: _norm_of(found[name].cpu() - gradient.cpu()) / whole for name, gradient in expected.items()}
    assert not {name: difference for name, difference in apart.items() if not difference <= tolerance}
    return max(apart.values())


def assert_near(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    """Compare a result relative to the norm of what it has to be, wherever both are."""
    assert found.shape == expected.shape
    assert _distance(found, expected) <= tolerance


def assert_each_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compare every value, relative to the largest, or to one where all are smaller."""
    found, expected = found.detach().cpu(), expected.detach().cpu()
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= tolerance * max(1.0, float(expected.abs().max()))


def _norm_of(tensor: Tensor) -> float:
    return tensor.double().norm().item()


def _distance(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
    return ((found - expected).norm() / expected.norm().clamp(min=1e-30)).item()
