"""Compare whole models with the CPU: outputs, gradients and generated tokens."""

import torch
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
    moved = {key: value.to("npu") for key, value in inputs.items()}
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
    gradients = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    found_gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == found_gradients.keys()
    whole = torch.stack([g.float().norm() for g in gradients.values()]).norm().item()
    for n, gradient in gradients.items():
        difference = (found_gradients[n].cpu() - gradient).norm().item() / whole
        assert difference <= TOLERANCE, n
        largest = max(largest, difference)

    if zoo.can_generate(name):
        options = {"max_new_tokens": 4, "do_sample": False}
        assert torch.equal(model.generate(**moved, **options).cpu(), reference.generate(**inputs, **options))
    return largest


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.detach().cpu().double(), expected.detach().double()
    return ((found - expected).norm() / expected.norm().clamp(min=1e-30)).item()
