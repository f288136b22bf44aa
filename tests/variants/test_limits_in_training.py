"""What training asks of operators that some releases of CANN refuse: the same gradients on this release, in float64.

The software device refuses what the release refuses; what is launched is counted, so that no release gets less than it
takes, and no newer one waits for what 8.2 waits for.
"""

from collections.abc import Iterator
from importlib import import_module

import pytest
import torch
from torch import Tensor

import softnpu
from softnpu.formulas import grouped_matmul_limits

RELEASE = tuple(int(part) for part in torch.version.cann.split(".")[:2])
# op-plugin 7.1.0 sums over no groups, whatever CANN it is on
SUMS_GROUPS = RELEASE >= (8, 3) and hasattr(torch.ops.npu, "npu_moe_token_permute_grad")
GRADIENT_OF_ATTENTION = torch.ops.npu.npu_fusion_attention_grad.default._schema.arguments
TAKES_SINKS = RELEASE >= (8, 5) and any(argument.name == "sink" for argument in GRADIENT_OF_ATTENTION)
ONE_ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # of sums in float32


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def launched(name: str) -> int:
    return softnpu.counters().get(name, 0)


def assert_close(found: Tensor, exact: Tensor, tolerance: float) -> None:
    assert (found.detach().cpu().double() - exact.detach()).norm() <= tolerance * exact.norm()


# ---- experts --------------------------------------------------------------------------------------------------------
def in_float64(x: Tensor, weights: list[Tensor], counts: list[int], bias: Tensor | None) -> Tensor:
    parts = zip(x.split(counts), weights, [0.0] * len(counts) if bias is None else bias)
    return torch.cat([rows @ weight + offset for rows, weight, offset in parts])


@pytest.mark.parametrize("listed", [False, True], ids=["stacked", "listed"])
@pytest.mark.parametrize("dtype", ONE_ROUNDING, ids=str)
def test_gradients_of_experts_weights_need_no_sums_of_groups(kernels, dtype, listed) -> None:
    """The host waits for the counts in float32 alone, and on no release that sums over groups."""
    moe, counts = kernels["FusedMoE"], [3, 0, 5, 1]
    x, grad = randn(9, 24, dtype=dtype), randn(9, 40, seed=1, dtype=dtype)
    weights, bias = randn(4, 40, 24, seed=2, dtype=dtype), randn(4, 40, seed=3, dtype=dtype)
    exact = [tensor.double().requires_grad_() for tensor in (x, weights, bias)]
    in_float64(exact[0], [weight.T for weight in exact[1]], counts, exact[2]).backward(grad.double())

    sizes = torch.tensor(counts).npu()
    if listed:
        leaves = [tensor.npu().requires_grad_() for tensor in (x, *weights, *bias)]
        y = moe.HybridGmmFunction.apply(leaves[0], sizes, None, True, *leaves[1:])
    else:
        leaves = [tensor.npu().requires_grad_() for tensor in (x, weights, bias)]
        y = moe.grouped_matmul(leaves[0], leaves[1].mT, sizes, leaves[2])
    given = grad.npu()
    softnpu.reset_counters()
    y.backward(given)
    added = 0 if SUMS_GROUPS or dtype is torch.float32 else 2
    assert launched("npu_grouped_matmul") == (3 if SUMS_GROUPS else 1)
    assert launched("npu_grouped_matmul_add_") == added
    assert (launched("stream_syncs") > 0) is (not SUMS_GROUPS and dtype is torch.float32)
    found = [leaf.grad for leaf in leaves]
    found = [found[0], torch.stack(found[1:5]), torch.stack(found[5:])] if listed else found
    for one, leaf in zip(found, exact):
        assert one.dtype is dtype
        assert_close(one, leaf.grad, ONE_ROUNDING[dtype])
    assert not found[1][1].any()  # an expert without rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_compiled_gradient_of_experts_weights_is_the_eager_one(kernels, dtype) -> None:
    moe, sizes = kernels["FusedMoE"], torch.tensor([3, 0, 5, 1]).npu()
    x, weight = (randn(*shape, dtype=dtype).npu() for shape in ((9, 24), (4, 24, 40)))
    grads = []
    for function in (moe.grouped_matmul, torch.compile(moe.grouped_matmul, backend="aot_eager", fullgraph=True)):
        leaf = weight.clone().requires_grad_()
        function(x, leaf, sizes).square().sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["rows and weights", "weights alone"])
def test_weights_of_another_dtype_than_the_rows_have_a_gradient(kernels, dtype) -> None:
    """DeepSeek-V3's router gives float32 weights to experts in bfloat16."""
    moe, index = kernels["FusedMoE"], torch.tensor([[1, 0], [2, 1], [1, 2]])
    x, weights, grad = randn(3, 16, dtype=dtype), randn(3, 2, seed=1), randn(3, 16, seed=2, dtype=dtype)
    stacked = randn(3, 16, 16, seed=3, dtype=dtype), randn(3, 16, 8, seed=4, dtype=dtype)
    results = []
    for device in ("npu", "cpu"):
        to = {"device": device} if device == "npu" else {"device": device, "dtype": torch.float64}
        leaves = [tensor.to(**to).requires_grad_() for tensor in (x, weights)]
        y = moe.fused_experts(leaves[0], index.to(device), leaves[1], *(tensor.to(**to) for tensor in stacked))
        given = grad.to(**to)
        softnpu.reset_counters()
        y.backward(given)
        fused = launched("npu_moe_token_unpermute_grad")
        results.append((leaves[0].grad, leaves[1].grad, fused))
    has_gradients = hasattr(torch.ops.npu, "npu_moe_token_unpermute_grad")
    assert results[0][2] == int(has_gradients and (dtype is torch.float32 or RELEASE >= (9, 0)))
    assert results[0][1].dtype is torch.float32
    steps = 6 * torch.finfo(dtype).eps  # a rounding of each tensor between experts and weights
    for one, expected in zip(results[0][:2], results[1][:2]):
        assert_close(one, expected, steps)


@pytest.mark.parametrize("listed", [False, True], ids=["stacked", "listed"])
@pytest.mark.parametrize("dtype", ONE_ROUNDING, ids=str)
def test_groups_that_are_too_long_for_the_device_go_in_pieces(kernels, monkeypatch, dtype, listed) -> None:
    """A group of 2**32 elements is refused, here of 200: five rows of 40, where the longest group has twelve."""
    moe, counts, rest = kernels["FusedMoE"], [3, 0, 12, 1], 2
    products = import_module(f"{moe.__name__}.ops.gmm")
    monkeypatch.setattr(products, "_SIZE", 5)
    monkeypatch.setattr(products, "_GROUP_ELEMENTS", 200)
    monkeypatch.setattr(grouped_matmul_limits, "MAX_OFFSET", 200)
    x, grad = randn(16 + rest, 24, dtype=dtype), randn(16 + rest, 40, seed=1, dtype=dtype)
    weights, bias = randn(4, 40, 24, seed=2, dtype=dtype), randn(4, 40, seed=3, dtype=dtype)
    exact = [tensor.double().requires_grad_() for tensor in (x, weights, bias)]
    y_exact = in_float64(exact[0][:-rest], [weight.T for weight in exact[1]], counts, exact[2])
    y_exact.backward(grad[:-rest].double())

    sizes, tail = torch.tensor(counts).npu(), (torch.arange(len(x)) >= 16).unsqueeze(-1).npu()
    if listed:
        leaves = [tensor.npu().requires_grad_() for tensor in (x, *weights, *bias)]
        y = moe.HybridGmmFunction.apply(leaves[0], sizes, tail, True, *leaves[1:])
        y.backward(grad.npu())
        d_weights, d_bias = (torch.stack([leaf.grad for leaf in part]) for part in (leaves[1:5], leaves[5:]))
    else:
        leaves = [tensor.npu().requires_grad_() for tensor in (x, weights, bias)]
        y = moe.GmmFunction.apply(leaves[0], leaves[1].mT, sizes, leaves[2], tail)
        y.backward(grad.npu())
        d_weights, d_bias = leaves[1].grad, leaves[2].grad
    assert_close(y[:-rest], y_exact, ONE_ROUNDING[dtype])
    for found, tensor in zip((leaves[0].grad, d_weights, d_bias), exact):
        assert_close(found, tensor.grad, ONE_ROUNDING[dtype])


# ---- norms ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_norm_with_a_weight_in_float32_is_as_exact_where_the_operator_takes_one_dtype(kernels, weight_dtype) -> None:
    norms = kernels["RMSNorm"]
    x, grad = randn(6, 256, dtype=torch.bfloat16), randn(6, 256, seed=1, dtype=torch.bfloat16)
    weight = randn(256, seed=2, dtype=weight_dtype)
    leaves, exact = ([fit(t).requires_grad_() for t in (x, weight)] for fit in (Tensor.npu, Tensor.double))
    softnpu.reset_counters()
    y = norms.rms_norm(leaves[0], leaves[1], 1e-6)
    y.backward(grad.npu())
    assert launched("npu_rms_norm") == launched("npu_rms_norm_backward") == 1
    expected = exact[0] * torch.rsqrt(exact[0].square().mean(-1, keepdim=True) + 1e-6) * exact[1]
    expected.backward(grad.double())
    for one, truth, dtype in zip(
        (y.detach(), *(t.grad for t in leaves)),
        (expected.detach(), *(t.grad for t in exact)),
        (x.dtype, x.dtype, weight_dtype),
    ):
        assert one.dtype is dtype
        assert_close(one, truth, ONE_ROUNDING[dtype])


def test_zero_centred_norms_train_on_every_release(kernels) -> None:
    norms = kernels["RMSNorm"]
    x, weight = (randn(*shape, dtype=torch.bfloat16) for shape in ((6, 256), (256,)))
    results = []
    for fit in (Tensor.npu, Tensor.double):
        leaves = [fit(tensor).requires_grad_() for tensor in (x, weight)]
        norms.zero_centered_rms_norm(*leaves, 1e-6).sum().backward()
        results.append([leaf.grad for leaf in leaves])
    for one, truth in zip(*results):
        assert_close(one, truth, ONE_ROUNDING[torch.bfloat16])


# ---- sinks ----------------------------------------------------------------------------------------------------------
@pytest.fixture(params=["", "option", "switch"])
def deterministic(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Tells the kernel, or torch, or nobody; torch by the mode, which needs no import of Inductor."""
    torch.set_deterministic_debug_mode("error" if request.param == "switch" else "default")
    yield request.param == "option"
    torch.set_deterministic_debug_mode("default")


def with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, lengths: list[int], window: int | None) -> Tensor:
    """Compute causal attention of packed sequences, ``[T, N, D]``, with one more score of each row."""
    parts = []
    for one, keys, values in zip(*(t.split(lengths) for t in (q, k, v))):
        scores = torch.einsum("qnd,knd->nqk", one, keys) * 64**-0.5
        distance = torch.arange(len(one)).unsqueeze(1) - torch.arange(len(one))
        seen = (distance >= 0) & (distance <= (len(one) if window is None else window))
        scores = torch.cat([scores.masked_fill(~seen, -torch.inf), sinks.view(-1, 1, 1).expand(-1, len(one), 1)], -1)
        parts.append(torch.einsum("nqk,knd->qnd", scores.softmax(-1)[..., :-1], values))
    return torch.cat(parts)


@pytest.mark.filterwarnings("ignore:flash_attention. attention with sinks is computed in torch")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 3], ids=["causal", "sliding"])
@pytest.mark.parametrize("layout", ["packed", "tokens first", "heads first"])
def test_sinks_train_on_every_release(kernels, layout, window, dtype, deterministic) -> None:
    attention, lengths = kernels["FlashAttention"], [5, 2, 6] if layout == "packed" else [13]
    tensors = [randn(13, 4, 64, seed=i, dtype=dtype) for i in range(4)]
    sinks = randn(4, seed=4, dtype=dtype)
    options = {"causal": True, "window_size": (-1 if window is None else window, 0), "deterministic": deterministic}

    exact = [tensor.double().requires_grad_() for tensor in (*tensors[:3], sinks)]
    with_sinks(*exact, lengths, window).backward(tensors[3].double())
    leaves = [tensor.npu().requires_grad_() for tensor in (*tensors[:3], sinks)]
    softnpu.reset_counters()
    if layout == "packed":
        ends = [0, 5, 7, 13]
        found = attention.flash_attn_varlen_func(*leaves[:3], ends, ends, s_aux=leaves[3], **options)
    else:
        first = layout == "heads first"
        given = [t.transpose(0, 1).contiguous().transpose(0, 1) if first else t for t in leaves[:3]]
        found = attention.flash_attn_func(*(t.unsqueeze(0) for t in given), s_aux=leaves[3], **options)[0]
    found.backward(tensors[3].npu())

    gradients = launched("npu_fusion_attention_grad") + launched("npu_fusion_attention_grad_v3")
    assert gradients == int(TAKES_SINKS)
    # a result of values about one is rounded once, its gradient has two more products; sums over 13 rows
    for one, leaf in zip(leaves, exact):
        assert_close(one.grad, leaf.grad, 8 * ONE_ROUNDING[dtype])


@pytest.mark.filterwarnings("ignore:flash_attention. attention with sinks is computed in torch")
def test_no_sum_of_a_sink_is_lost_however_many_blocks_there_are(kernels) -> None:
    """1,024 sequences, the longest of two blocks of 256 queries and of keys, are what a release loses the sums of."""
    lengths = [1] * 1023 + [300]
    tensors = [randn(sum(lengths), 1, 64, seed=i, dtype=torch.bfloat16) for i in range(3)]
    sinks, ends = randn(1, seed=3), [0, *torch.tensor(lengths).cumsum(0).tolist()]
    results = []
    for fit in (Tensor.npu, Tensor.double):
        leaf, (q, k, v) = fit(sinks).requires_grad_(), map(fit, tensors)
        if fit is Tensor.npu:
            out = kernels["FlashAttention"].flash_attn_varlen_func(q, k, v, ends, ends, causal=True, s_aux=leaf)
        else:
            out = with_sinks(q, k, v, leaf, lengths, None)
        out.square().sum().backward()
        results.append(leaf.grad)
    assert_close(*results, 4 * ONE_ROUNDING[torch.bfloat16])
