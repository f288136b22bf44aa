"""Whole graphs under torch.compile, forward and backward, of the functions and of models."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from tests.support.attention_models import BATCHES, NAME, on_npu, pair

SINKS = torch.randn(4, generator=torch.Generator().manual_seed(3))
OPTIONS = {
    "full": {},
    "window": {"window_size": (3, 2)},
    "softcap": {"softcap": 2.0},
    "sinks": {"causal": True, "s_aux": SINKS},
}


@pytest.mark.parametrize(
    ("name", "dynamic"), [("full", False), ("window", True), ("softcap", False), ("sinks", False), ("sinks", True)]
)
def test_one_graph_gives_what_the_function_gives(kernel: ModuleType, name: str, dynamic: bool) -> None:
    """The same operators in the same order: exactly."""
    torch.compiler.reset()
    options = on_npu(OPTIONS[name])
    q, k, v = (torch.randn(2, 8, n, 16, device="npu") for n in (4, 2, 2))
    compiled, eager = ([t.clone().requires_grad_() for t in (q, k, v)] for _ in range(2))

    def function(*tensors: torch.Tensor) -> torch.Tensor:
        return kernel.flash_attn_func(*tensors, **options)

    found = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)(*compiled)
    expected = function(*eager)
    found.sum().backward()
    expected.sum().backward()
    assert torch.equal(found, expected)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(compiled, eager))


@pytest.mark.parametrize(
    ("name", "batch"), [pytest.param("qwen3", "plain", marks=pytest.mark.long), ("gemma3", "left padding")]
)
def test_a_model_is_one_graph(kernel: ModuleType, monkeypatch, name: str, batch: str) -> None:
    """To the tolerance of test_attention_models.py, where a token is no padding."""
    torch.compiler.reset()
    monkeypatch.setitem(AttentionInterface._global_mapping, NAME, kernel.attention_forward)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, NAME, kernel.attention_mask)
    model, ours = pair(name)
    inputs = BATCHES[batch]()
    with torch.no_grad():
        expected = model(**inputs, use_cache=False).logits
        compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
        found = compiled(**on_npu(inputs), use_cache=False).logits.cpu()
    kept = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    assert (found - expected)[kept].abs().max() <= 5e-6 * max(1.0, float(expected.abs().max()))
