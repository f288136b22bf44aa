"""The calls that some releases of CANN refuse, crash or hang at: each on both sides of its limit, on this release.

The software device refuses what the release refuses, so that a call on the wrong side raises; what is launched is
counted, so that no release gets less than it takes. Values are those of the CPU.
"""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import softnpu

RELEASE = tuple(int(part) for part in torch.version.cann.split(".")[:2])
# CANN's ops-transformer, rope_with_sin_cos_cache_tiling.cpp: heads of 128 whose token fits into local memory
MOST_HEADS = {(8, 2): 42, (8, 3): 42, (8, 5): 53}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def launched(name: str, **counting: bool) -> int:
    return softnpu.counters(**counting).get(name, 0)


def assert_close(found: Tensor, expected: Tensor, what: str = "values") -> None:
    """To float32: sums of products of at most 256 values about one."""
    torch.testing.assert_close(found.detach().cpu(), expected.detach(), rtol=1e-5, atol=1e-5, msg=what)


# ---- rotary position embedding --------------------------------------------------------------------------------------
@pytest.mark.parametrize("heads", [42, 43, 53, 54, 64])
@pytest.mark.parametrize("of_keys", [False, True], ids=["queries", "keys"])
def test_a_step_of_decoding_rotates_as_many_heads_together_as_the_tiling_divides_by(kernels, heads, of_keys) -> None:
    rope = kernels["RoPE"]
    embedding = nn.Module()  # as Llama's, without the import of transformers, for each release
    embedding.inv_freq, embedding.attention_scaling = (1e-4 ** (torch.arange(0, 128, 2) / 128)).npu(), 1.0
    cos, sin = rope.layers.RotaryEmbedding.forward(embedding, torch.empty(1, device="npu"), torch.tensor([[7]]).npu())
    q, k = randn(1, heads, 1, 128), randn(1, 8, 1, 128, seed=1)
    q, k = (k, q) if of_keys else (q, k)
    softnpu.reset_counters()
    found = rope.apply_rotary_pos_emb(q.npu(), k.npu(), cos, sin)
    together = heads <= MOST_HEADS.get(RELEASE, heads)
    assert (launched("npu_mrope"), launched("npu_rotary_mul")) == ((1, 0) if together else (0, 2))
    for one, expected in zip(found, rope.apply_rotary_pos_emb(q, k, cos.cpu(), sin.cpu())):
        assert_close(one, expected)


@pytest.mark.parametrize(
    ("shape", "rows", "interleaved"),
    [
        ((1000, 2, 3, 32), 1000, False),  # more rows than a layout has
        ((1000, 1, 3, 32), 1000, False),  # of one head
        ((2, 3, 5, 32), 2, True),  # a cos a row
        ((500, 2, 3, 32), 1, True),  # more rows and heads than a layout has
    ],
)
def test_tokens_are_rotated_in_one_launch_without_three_dimensions(kernels, shape, rows, interleaved) -> None:
    rope, (_, _, positions, size) = kernels["RoPE"], shape
    x, cos, sin = randn(*shape), randn(rows, 1, positions, size, seed=1), randn(rows, 1, positions, size, seed=2)
    if interleaved:
        cos, sin = (t[..., ::2].repeat_interleave(2, -1) for t in (cos, sin))
    else:
        cos, sin = (torch.cat((t[..., : size // 2],) * 2, -1) for t in (cos, sin))
    grad, results = randn(*shape, seed=3), []
    for device in ("npu", "cpu"):
        leaf = x.to(device).requires_grad_()
        softnpu.reset_counters()
        y = rope.rotary_mul(leaf, cos.to(device), sin.to(device), interleaved)
        y.backward(grad.to(device))
        results.append((y, leaf.grad, launched("npu_rotary_mul"), launched("npu_rotary_mul_backward")))
    assert results[0][2:] == (1, 1)
    assert_close(results[0][0], results[1][0])
    assert_close(results[0][1], results[1][1], "gradient")


@pytest.mark.parametrize("positions", [4, 8, 9])
@pytest.mark.parametrize("name", ["rotary_mul", "apply_rotary_pos_emb"])
def test_a_cos_for_each_of_many_sequences_has_a_gradient(kernels, name, positions) -> None:
    """Of 8 sequences: with as many positions or fewer the gradient has no layout for heads before positions."""
    rope, shape = kernels["RoPE"], (8, 2, positions, 64)
    x, grad = randn(*shape), randn(*shape, seed=3)
    angles = randn(8, positions, 32, seed=1)
    cos, sin = (torch.cat((t, t), -1) for t in (angles.cos(), angles.sin()))
    results = []
    for device in ("npu", "cpu"):
        leaf, tables = x.to(device).requires_grad_(), [cos.to(device), sin.to(device)]
        softnpu.reset_counters()
        if name == "rotary_mul":
            y = rope.rotary_mul(leaf, *(t.unsqueeze(1) for t in tables))
        else:
            y = sum(rope.apply_rotary_pos_emb(leaf, leaf, *tables))
        y.backward(grad.to(device))
        results.append((y, leaf.grad, launched("npu_rotary_mul"), launched("npu_rotary_mul_backward")))
    calls = 1 if name == "rotary_mul" else 2
    assert results[0][2:] == (calls, calls)
    assert_close(results[0][0], results[1][0])
    assert_close(results[0][1], results[1][1], "gradient")


# ---- gating ---------------------------------------------------------------------------------------------------------
DEEPSEEK = {"experts": 256, "k": 8, "bias": True, "groups": 8, "top_groups": 4, "scale": 2.5}
GATINGS = {  # what differs from DeepSeek-V3's, and whether CANN 8.2 takes it
    "DeepSeek-V3": ({}, True),
    "32 choices": ({"k": 32}, True),
    "33 choices": ({"k": 33}, False),
    "128 experts": ({"experts": 128}, False),
    "no bias": ({"bias": False}, False),
    "no groups": ({"groups": 1, "top_groups": 1}, False),
    "two groups": ({"top_groups": 2}, False),
    "best of a group": ({"group_scores": "best"}, False),
    "softmax, best of a group": ({"scores": "softmax", "group_scores": "best", "renormalise": False}, True),
    "undivided": ({"renormalise": False}, False),
    "training": ({"trains": True}, False),
}


@pytest.mark.parametrize("name", GATINGS)
def test_gating_is_one_launch_where_the_release_has_its_shape(kernels, name) -> None:
    differs, is_taken = GATINGS[name]
    options: dict[str, Any] = {"trains": False, **DEEPSEEK, **differs}
    experts, biased, trains = (options.pop(key) for key in ("experts", "bias", "trains"))
    logits, bias = randn(5, experts), randn(experts, seed=1) if biased else None
    results = []
    for device in ("npu", "cpu"):
        leaf = logits.to(device).requires_grad_(trains)
        softnpu.reset_counters()
        weights, chosen = kernels["FusedMoE"].gating_top_k(
            leaf,
            options["k"],
            None if bias is None else bias.to(device),
            **{k: v for k, v in options.items() if k != "k"},
        )
        fused = launched("npu_moe_gating_top_k")
        if trains:
            weights.square().sum().backward()
        spread = torch.zeros(5, experts).scatter(-1, chosen.cpu(), weights.detach().cpu())
        results.append((spread, leaf.grad if trains else spread, fused))
    assert results[0][2] == int(is_taken or RELEASE >= (8, 3))
    assert_close(results[0][0], results[1][0])
    assert_close(results[0][1], results[1][1], "gradient")


# ---- indexers -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("gap", [False, True], ids=["together", "with a gap"])
def test_keys_of_one_query_are_chosen_by_an_operator_where_there_is_one(kernels, gap) -> None:
    """Integers of few bits: their scores are exact in float16, and half a score lies between one key and the next."""
    keys, count = 96, 16
    seen = torch.arange(keys) % keys >= 8
    seen[40:44] &= not gap
    order = torch.randperm(keys, generator=torch.Generator().manual_seed(0))
    query, key = torch.zeros(1, 1, 64, 128), torch.zeros(1, keys, 128)
    query[..., 0], key[..., 0] = 1, order.float()
    found = []
    for device in ("npu", "cpu"):
        mask = seen.view(1, 1, keys).to(device)
        moved = [each.half().to(device) for each in (query, key, torch.ones(1, 1, 64))]
        softnpu.reset_counters()
        found.append(kernels["FlashAttention"].top_k_keys(*moved, mask, count).cpu().sort().values)
        launches = launched("npu_lightning_indexer")
        assert launches == (2 if device == "npu" and RELEASE >= (9, 0) else 0)
    assert torch.equal(found[0], found[1])


# ---- nothing --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)])
def test_nothing_is_launched_of_empty_tensors(kernels, shape) -> None:
    """The tiling of the norm refuses them: ops-nn, rms_norm_tiling.cpp, "Input x shape can not be 0"."""
    weight = torch.ones(8).npu()
    for function in (lambda x: kernels["RMSNorm"].rms_norm(x, weight, 1e-6), kernels["Activation"].quick_gelu):
        x = torch.ones(shape).npu().requires_grad_()
        softnpu.reset_counters()
        y = function(x)
        y.sum().backward()
        assert (y.shape, x.grad.shape) == (shape, shape)
        assert not [name for name in softnpu.counters() if name.startswith("npu_")]


# ---- activations in graphs ------------------------------------------------------------------------------------------
def test_a_captured_activation_is_an_operator_that_graphs_take(kernels) -> None:
    if not hasattr(torch.npu, "graph"):
        pytest.skip("this release has no graphs")
    x, graph = randn(4, 64).npu(), torch.npu.NPUGraph()
    quick_gelu = kernels["Activation"].quick_gelu
    with torch.npu.graph(graph):
        y = quick_gelu(x)
    x.copy_(randn(4, 64, seed=1))
    softnpu.reset_counters()
    graph.replay()
    assert launched("npu_fast_gelu", in_graphs=True) == int(RELEASE >= (8, 5))
    assert_close(y, quick_gelu(randn(4, 64, seed=1)))
    softnpu.reset_counters()
    assert_close(quick_gelu(x), quick_gelu(randn(4, 64, seed=1)))
    assert launched("npu_fast_gelu") == 1


def test_a_captured_gradient_of_an_activation_is_right(kernels) -> None:
    """Of a forward before the capture, which had the operator: to the rounding of float32."""
    if not hasattr(torch.npu, "graph"):
        pytest.skip("this release has no graphs")
    x, graph, stream = randn(4, 64).npu().requires_grad_(), torch.npu.NPUGraph(), torch.npu.Stream()
    with torch.npu.stream(stream):  # autograd computes a gradient on the stream of its forward
        y = kernels["Activation"].quick_gelu(x)
        ones = torch.ones_like(y)
    with torch.npu.graph(graph, stream=stream):
        (found,) = torch.autograd.grad(y, x, ones)
    graph.replay()
    exact = x.detach().cpu().double().requires_grad_()
    (exact * torch.sigmoid(1.702 * exact)).sum().backward()
    torch.testing.assert_close(found.cpu().double(), exact.grad, rtol=1e-6, atol=1e-6)


# ---- attention ------------------------------------------------------------------------------------------------------
def packed(attention: ModuleType, device: str, size: int, window: tuple[int, int], trains: bool) -> tuple[Tensor, ...]:
    """Results and gradients of two packed sequences."""
    q, k, v = (randn(7, 2, size, seed=seed).to(device).requires_grad_(trains) for seed in range(3))
    ends = torch.tensor([0, 3, 7], dtype=torch.int32, device=device)
    out = attention.flash_attn_varlen_func(q, k, v, ends, ends, 4, 4, window_size=window)
    if trains:
        out.backward(randn(7, 2, size, seed=3).to(device))
    return out, *(tensor.grad for tensor in (q, k, v) if trains)


def fused_attention() -> int:
    return launched("npu_fusion_attention") + launched("npu_fusion_attention_v3")


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    ("size", "window", "has_gradient"),
    [
        (64, (0, 0), False),  # pre_token + next_token > 0 in the layout TND
        (64, (1, 0), True),
        (512, (1, 0), True),
        (520, (1, 0), RELEASE >= (8, 5)),  # of the pages of the gradient before
    ],
)
def test_packed_attention_is_one_launch_where_its_gradient_is(kernels, size, window, has_gradient, trains) -> None:
    attention = kernels["FlashAttention"]
    softnpu.reset_counters()
    found = packed(attention, "npu", size, window, trains)
    assert fused_attention() == int(has_gradient or not trains)
    for one, expected in zip(found, packed(attention, "cpu", size, window, trains)):
        torch.testing.assert_close(one.detach().cpu(), expected.detach(), rtol=1e-4, atol=1e-4)


def test_packed_attention_takes_a_default_device(kernels) -> None:
    attention = kernels["FlashAttention"]
    softnpu.reset_counters()
    with torch.device("npu"):
        q, k, v = (randn_on_npu(7, 2, 64, seed) for seed in range(3))
        ends = torch.tensor([0, 3, 7], dtype=torch.int32)
        out = attention.flash_attn_varlen_func(q, k, v, ends, ends, 4, 4, causal=True)
    assert fused_attention() == 1
    q, k, v, ends = (tensor.cpu() for tensor in (q, k, v, ends))
    expected = attention.flash_attn_varlen_func(q, k, v, ends, ends, 4, 4, causal=True)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-4)


def randn_on_npu(*shape_and_seed: int) -> Tensor:
    *shape, seed = shape_and_seed
    return torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").npu()


def test_latents_are_read_as_they_lie_where_the_release_takes_them_so(kernels) -> None:
    """Before CANN 8.5 it wants pages: they are copied, with the rotated part behind them, for another operator."""
    forward = kernels["FlashAttention"].attention_forward
    query, key, query_rope, key_rope = (
        randn(2, heads, tokens, size, seed=size + heads, dtype=torch.bfloat16)
        for size in (512, 64)
        for heads, tokens in ((4, 1), (1, 9))
    )
    found = []
    for device in ("npu", "cpu"):
        q, k, *rotated = (t.to(device) for t in (query, key, query_rope, key_rope))
        softnpu.reset_counters()
        with torch.no_grad():
            found.append(forward(nn.Identity(), q, k, k, None, scaling=0.05, rotated=tuple(rotated))[0])
        if device == "npu":
            as_they_lie = RELEASE >= (8, 5)
            assert launched("npu_fused_infer_attention_score") == int(as_they_lie)
            assert fused_attention() == int(not as_they_lie)
    # weights and results are rounded to bfloat16, by each of the two
    torch.testing.assert_close(found[0].cpu(), found[1], rtol=2.0**-6, atol=2.0**-6)
