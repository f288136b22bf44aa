"""Counted: what sparse attention holds and moves in a layer of DeepSeek-V3.2, at its published sizes."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from transformers import DeepseekV32Config, DynamicCache
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention

import kernels_ext_npu
from kernels_ext_npu.inspection.counting.dispatch import Counting
from kernels_ext_npu.inspection.counting.known_values import KnownValues
from kernels_ext_npu.measuring.roofline import SOCS

pytestmark = pytest.mark.usefixtures("registered")
TOKENS = 2**15
PLACES = torch.arange(TOKENS + 4).unsqueeze(0)
KEPT = {
    "without a mask": None,
    "nothing is padding": PLACES[:, : TOKENS + 2] >= 0,
    "padding before": PLACES[:, : TOKENS + 3] >= 100,
    "a gap": PLACES[:, : TOKENS + 4] != 100,
}


@pytest.mark.parametrize("operators", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_layer_of_deepseek_v32_at_32k_tokens(monkeypatch, operators: bool) -> None:
    """A prompt holds less than 3.5 GB beyond its inputs; by operators a token moves weights, index keys, latents.

    Keys that it sees are copied where others lie between them. The weights of keys and values are halves of one, which
    their products copy, those of keys in another order.
    """
    config = DeepseekV32Config()
    config._attn_implementation = "sdpa"
    kernel = kernels_ext_npu.load("FlashAttention")
    if not operators:
        monkeypatch.setattr(import_module(f"{kernel.__name__}.ops.limits"), "CANN", (8, 3))
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        layer = fake_attention(config)
        kernels_ext_npu.kernelize(torch.nn.ModuleDict({"attention": layer}))
        x = torch.zeros(1, TOKENS, config.hidden_size, dtype=torch.bfloat16, device="npu")
        table = torch.zeros(1, TOKENS, config.qk_rope_head_dim, dtype=torch.bfloat16, device="npu")
        cache = DynamicCache(config=config)

        def mask(queries: int, keys: int, padding: Tensor | None = None):
            described = {"q_offset": keys - queries, "attention_mask": padding, "device": "npu"}
            return kernel.attention_mask(1, queries, keys, allow_is_causal_skip=False, **described)

        counting = Counting(KnownValues(), SOCS["910b3"], None)
        counting.memory.exclude([x, table, *layer.parameters()])
        with counting:
            layer(x, (table, table), mask(TOKENS, TOKENS), past_key_values=cache)
        counts = counting.counts()
        assert counts.waits == 0
        assert counts.peak <= 3.5e9  # with workspaces
        weights = sum(parameter.nbytes for parameter in layer.parameters())
        index_keys, latents_read = TOKENS * 128 * 2, 2048 * 576 * 2
        for number, (name, kept) in enumerate(KEPT.items(), 1):
            keys, values = TOKENS + number, KnownValues()
            padding = None
            if kept is not None:
                padding = values.learn(torch.zeros(1, keys, dtype=torch.bool, device="npu"), kept)
            with Counting(values, SOCS["910b3"]) as counting:
                layer(x[:, :1], (table[:, :1],) * 2, mask(1, keys, padding), past_key_values=cache)
            assert counting.counts().waits == 0
            moved = counting.bytes.total() - weights - counting.bytes["cat"]  # what a growing cache is made anew of
            copied = 2 if name == "a gap" else 0  # read and written
            most = 1.6 * (index_keys + latents_read) + copied * index_keys + 3 * layer.kv_b_proj.weight.nbytes
            assert moved <= most or not operators


def test_training_under_autocast_holds_what_grows_with_tokens_alone() -> None:
    """Weights in float32, as Trainer(bf16=True) has them."""
    config, kernel, peaks = DeepseekV32Config(), kernels_ext_npu.load("FlashAttention"), []
    config._attn_implementation = "sdpa"
    for tokens in (4096, 8192):
        with FakeTensorMode(allow_non_fake_inputs=True):
            layer = fake_attention(config, torch.float32).train()
            kernels_ext_npu.kernelize(torch.nn.ModuleDict({"attention": layer}))
            x = torch.zeros(1, tokens, config.hidden_size, device="npu", requires_grad=True)
            table = torch.zeros(1, tokens, config.qk_rope_head_dim, device="npu")
            mask = kernel.attention_mask(1, tokens, tokens, device="npu", allow_is_causal_skip=False)
            counting = Counting(KnownValues(), SOCS["910b3"], None)
            counting.memory.exclude([x, table, *layer.parameters()])
            with counting:
                with torch.autocast("npu", torch.bfloat16):
                    out = layer(x, (table, table), mask)[0]
                out.float().sum().backward()
            peaks.append(counting.counts().peak)
    assert peaks[1] <= 2 * peaks[0]


def test_the_loss_of_an_indexer_at_32k_tokens() -> None:
    """Loss and gradients of a layer hold less than the scores of one head in float32, in launches of 8,192 queries."""
    kernel = kernels_ext_npu.load("FlashAttention")
    with FakeTensorMode(allow_non_fake_inputs=True):
        heads, size, index_heads, index_size, chosen = 128, 576, 64, 128, 2048
        shapes = (heads, size), (1, size), (index_heads, index_size), (index_size,), (index_heads,)
        given = [torch.zeros(1, TOKENS, *shape, dtype=torch.bfloat16, device="npu") for shape in shapes]
        indexer = [tensor.requires_grad_() for tensor in given[2:]]
        indices = torch.zeros(1, TOKENS, chosen, dtype=torch.int32, device="npu")
        mask = kernel.attention_mask(1, TOKENS, TOKENS, device="npu", allow_is_causal_skip=False)
        counting = Counting(KnownValues(), SOCS["910b3"], None)
        counting.memory.exclude([*given, indices])
        with counting:
            kernel.indexer_loss(*given, mask, size**-0.5, indices).backward()
    assert all(tensor.grad is not None for tensor in indexer)
    assert counting.counts().waits == 0
    assert counting.counts().peak <= 4 * TOKENS**2
    assert counting.launches["npu_sparse_lightning_indexer_grad_kl_loss"] == TOKENS // 8192


def fake_attention(config: DeepseekV32Config, dtype: torch.dtype = torch.bfloat16) -> DeepseekV32Attention:
    """Make an attention on the NPU, inside a FakeTensorMode."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("npu"):
            return DeepseekV32Attention(config, 0).eval()
    finally:
        torch.set_default_dtype(before)
