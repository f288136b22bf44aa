"""Whole models with both functions registered, against eager attention in float32 on the CPU."""

import functools
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel, StaticCache

from tests.support import npu_counts
from tests.support.attention_models import BATCHES, MODELS, NAME, TOKENS, UNNAMED, ids, on_npu, padded, pair
from tests.support.nearness import assert_each_near

# Both are float32, with sums in another order: logits of size one differ by 1e-6 at most, gradients likewise.
FLOAT32 = 5e-6
LAUNCH = "npu_fusion_attention_v3"
pairs = functools.cache(pair)


@pytest.fixture(autouse=True)
def _implementation(kernel: ModuleType, monkeypatch) -> None:
    for name in (NAME, UNNAMED):
        monkeypatch.setitem(AttentionInterface._global_mapping, name, kernel.attention_forward)
        monkeypatch.setitem(AttentionMaskInterface._global_mapping, name, kernel.attention_mask)


def assert_equal(found: Tensor, expected: Tensor, kept: Tensor | None = None) -> None:
    """Compare, where a token is no padding."""
    rows = slice(None) if kept is None else kept.bool()
    assert_each_near(found.cpu()[rows], expected[rows], FLOAT32)


def logits(model: PreTrainedModel, inputs: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        return model(**inputs, use_cache=False).logits


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", MODELS)
def test_a_forward_is_that_of_eager_attention(npu_counters, name: str, batch: str) -> None:
    model, ours = pairs(name)
    inputs = BATCHES[batch]()
    expected = logits(model, inputs)
    npu_counts.reset()
    found = logits(ours, on_npu(inputs))
    assert npu_counters().get(LAUNCH, 0) == (0 if name == "gemma2" else ours.config.num_hidden_layers)
    assert not npu_counters().get("repeat_interleave") or name in ("gemma2", "gpt_oss")
    assert_equal(found, expected, inputs.get("attention_mask"))


# ---- caches ----------------------------------------------------------------------------------------------------------
def steps(model: PreTrainedModel, tokens: Tensor, cache: Any, mask: Tensor | None, lengths: list[int]) -> Tensor:
    """Run a sequence in several forwards with one cache."""
    found, end = [], 0
    for length in lengths:
        start, end = end, end + length
        options = {} if mask is None else {"attention_mask": mask[:, :end]}
        positions = torch.arange(start, end, device=tokens.device).expand(tokens.shape[0], -1)
        with torch.no_grad():
            out = model(tokens[:, start:end], past_key_values=cache, position_ids=positions, use_cache=True, **options)
        found.append(out.logits)
    return torch.cat(found, 1)


@pytest.mark.parametrize(
    ("lengths", "mask"),
    [([5, 9, 10], None), ([20, 1, 3], padded(slice(4))), ([1, 1, 22], None)],
    ids=["even", "padded", "at once"],
)
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma3", "gpt_oss", "llama4"])
def test_prefill_in_steps_and_several_tokens_at_decode(name, static, mask, lengths) -> None:
    model, ours = pairs(name)

    def cache(of: PreTrainedModel) -> Any:
        return StaticCache(config=of.config, max_cache_len=TOKENS + 6) if static else DynamicCache(config=of.config)

    tokens = ids(2)
    expected = steps(model, tokens, cache(model), mask, lengths)
    found = steps(ours, tokens.npu(), cache(ours), None if mask is None else mask.npu(), lengths)
    assert_equal(found, expected, mask)


# ---- masks of the caller ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [torch.bool, torch.float32, "bias"], ids=str)
def test_masks_of_the_caller(kind) -> None:
    """[B, 1, S, S]: a prefix that sees itself, and later tokens that see what is before them."""
    model, ours = pairs("qwen3")
    seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    seen[:6, :6] = True
    seen = seen.expand(2, 1, -1, -1).clone()
    seen[0, :, :, 9] = False
    seen[0, :, 9, 9] = True
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    added = mask + torch.linspace(-1, 1, TOKENS) if kind == "bias" else mask
    expected = logits(model, {"input_ids": ids(2), "attention_mask": added})
    given = seen if kind == torch.bool else added
    npu_counts.reset()
    found = logits(ours, {"input_ids": ids(2).npu(), "attention_mask": given.npu()})
    assert npu_counts.read().get(LAUNCH, 0) == (0 if kind == "bias" else 2)
    assert npu_counts.read()["stream_syncs"] == (0 if kind == torch.bool else 1)
    assert_equal(found, expected)


@pytest.mark.parametrize("shape", [(3, TOKENS), (TOKENS, TOKENS + 2)], ids=str)
def test_a_mask_of_another_shape_is_refused(shape) -> None:
    with pytest.raises(ValueError, match="attention_mask must be"):
        logits(pairs("qwen3")[1], {"input_ids": ids(2).npu(), "attention_mask": torch.ones(2, 1, *shape).npu()})
