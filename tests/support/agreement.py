"""Compare whole models with the CPU: outputs, gradients and generated tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

import kernels_ext_npu
from tests.support import zoo

# float32 through up to a few dozen operations a layer, relative to the norm of the result
TOLERANCE = 1e-5


def assert_agrees(name: str, model: PreTrainedModel) -> float:
    """Compare a model of the zoo that is on the NPU with the same model on the CPU; returns the largest difference.

    Where the attention is ours the other one's is eager: transformers' sdpa takes masks that are added to scores for
    boolean ones wherever torch_npu is. A query that sees no key gets zero from one and a mean from the other: what is
    at the places of padding is not compared, which is before the tokens in models of the zoo.
    """
    reference = zoo.build(name)
    by_name = any(row.kind == "attention" and row.swapped for row in kernels_ext_npu.report(model))
    if by_name:
        reference.set_attn_implementation("eager")
    inputs = zoo.inputs(name, reference)
    moved = {key: value.to("npu") for key, value in inputs.items()}
    expected, found = reference(**inputs), model(**moved)
    largest = 0.0
    expected, found = (list(_meant(zoo.tensors(outputs), inputs if by_name else {})) for outputs in (expected, found))
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


def _meant(outputs: Iterator[Tensor], inputs: zoo.Inputs) -> Iterator[Tensor]:
    """Leave out what is at the places of padding; of outputs of another length the rows with padding."""
    mask, decoded = inputs.get("attention_mask"), inputs.get("decoder_input_ids")
    for output in outputs:
        if mask is None or output.dim() < 3 or (decoded is not None and output.shape[1] == decoded.shape[1]):
            yield output
        elif output.shape[:2] == mask.shape:
            yield output[mask.bool().to(output.device)]
        elif len(output) == len(mask):
            yield output[mask.bool().all(-1).to(output.device)]
        else:
            yield output


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.detach().cpu().double(), expected.detach().double()
    return ((found - expected).norm() / expected.norm().clamp(min=1e-30)).item()
