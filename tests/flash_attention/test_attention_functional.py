"""flash_attn_func and flash_attn_varlen_func against float64: values, gradients, launches, waits, memory, refusals."""

from collections.abc import Sequence
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from kernels_ext_npu.selftest.functions import attention as attention_formula
from tests.support import npu_counts

# Weights and values are rounded to the dtype, sums of a few values are in float32: the result, a mean of values of size
# one, is off by a rounding of itself and as many of weights as there are keys, which add up to one. Gradients have one
# more product.
ROUNDING = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
FUSED = {"npu_fusion_attention", "npu_fusion_attention_v3"}

sizes = st.integers(1, 9)
windows = st.tuples(st.integers(-1, 6), st.integers(-1, 6))
heads = st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1), (3, 3)])
head_sizes = st.sampled_from([(16, 16), (8, 4), (5, 5), (6, 10), (24, 16)])
dtypes = st.sampled_from(list(ROUNDING))


def draw(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def launched() -> dict[str, int]:
    return {name: count for name, count in npu_counts.read().items() if name in FUSED or "infer" in name}


def agrees(found: Tensor, expected: Tensor, dtype: torch.dtype, factor: float = 4) -> None:
    """Within a few roundings of the largest value."""
    if not expected.numel():
        return
    error = (found.detach().cpu().double() - expected.detach()).abs().max()
    assert error <= factor * ROUNDING[dtype] * max(1.0, float(expected.detach().abs().max())), float(error)


def compare(function, truth, tensors: list[Tensor], sinks: Tensor | None, dtype: torch.dtype) -> None:
    """Compare a result and derivatives by all tensors, sinks among them, on the NPU with the truth in float64.

    In float32 also the second derivatives, which have one more product than the first.
    """
    given = [*tensors, *([sinks] if sinks is not None else [])]
    exact, leaves = ([move(t).requires_grad_() for t in given] for move in (lambda t: t.double(), lambda t: t.npu()))
    expected, found = truth(*exact), function(*leaves)
    assert found.dtype == dtype
    assert found.shape == expected.shape
    agrees(found, expected, dtype)
    if not expected.requires_grad:
        return  # nobody sees a key
    (grad,) = draw(1, tuple(found.shape), dtype=dtype)
    is_twice = dtype == torch.float32
    wanted, first = (
        torch.autograd.grad(y, xs, g, retain_graph=True, create_graph=is_twice, materialize_grads=True)
        for y, xs, g in ((expected, exact, grad.double()), (found, leaves, grad.npu()))
    )
    for a, b in zip(first, wanted):
        agrees(a, b, dtype, 16)
    if is_twice and any(g.requires_grad for g in wanted):
        for a, b in zip(second_gradients(first, leaves), second_gradients(wanted, exact)):
            agrees(a, b, dtype, 64)


def second_gradients(gradients: Sequence[Tensor], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """Differentiate the squared norm of gradients."""
    return torch.autograd.grad(sum(g.square().sum() for g in gradients), leaves, materialize_grads=True)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_every_flag_with_every_other(kernel: ModuleType, data: st.DataObject) -> None:
    (n, n_k), (d, d_v), dtype = data.draw(heads), data.draw(head_sizes), data.draw(dtypes)
    batch, queries, keys = data.draw(st.integers(1, 2)), data.draw(sizes), data.draw(sizes)
    options = {
        "causal": data.draw(st.booleans()),
        "softcap": data.draw(st.sampled_from([0.0, 0.0, 2.0])),
        "deterministic": data.draw(st.booleans()),
        "window_size": data.draw(windows),
        "softmax_scale": data.draw(st.sampled_from([None, 0.3])),
    }
    slopes = data.draw(st.sampled_from([None, None, torch.linspace(0.1, 1, n), torch.rand(batch, n)]))
    tensors = draw(0, (batch, queries, n, d), (batch, keys, n_k, d), (batch, keys, n_k, d_v), dtype=dtype)
    sinks = draw(2, (n,))[0] if data.draw(st.booleans()) else None
    scale = options["softmax_scale"] or d**-0.5
    truth = (scale, options["causal"], options["window_size"], options["softcap"], slopes)
    on_npu = None if slopes is None else slopes.npu()
    npu_counts.reset()
    compare(
        lambda q, k, v, s=None: kernel.flash_attn_func(q, k, v, alibi_slopes=on_npu, s_aux=s, **options),
        lambda q, k, v, s=None: attention_formula.attention(q, k, v, *truth, s),
        tensors, sinks, dtype,
    )  # fmt: skip
    assert bool(launched()) == (not options["softcap"] and slopes is None)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_every_flag_with_every_other_in_packed_sequences(kernel: ModuleType, data: st.DataObject) -> None:
    (n, n_k), (d, d_v), dtype = data.draw(heads), data.draw(head_sizes), data.draw(dtypes)
    lengths = data.draw(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=4))
    q_lengths, k_lengths = (list(column) for column in zip(*lengths))
    options = {
        "causal": data.draw(st.booleans()),
        "softcap": data.draw(st.sampled_from([0.0, 0.0, 2.0])),
        "deterministic": data.draw(st.booleans()),
        "window_size": data.draw(windows),
    }
    slopes = data.draw(st.sampled_from([None, None, torch.linspace(0.1, 1, n), torch.rand(len(lengths), n)]))
    rest, total, keys = data.draw(st.integers(0, 2)), sum(q_lengths), sum(k_lengths)
    tensors = draw(0, (total + rest, n, d), (keys, n_k, d), (keys, n_k, d_v), dtype=dtype)
    sinks = draw(2, (n,))[0] if data.draw(st.booleans()) else None
    ends, key_ends = (torch.tensor([0, *column]).cumsum(0).int().npu() for column in (q_lengths, k_lengths))
    on_npu = None if slopes is None else slopes.npu()
    lengths_and_scale = (q_lengths, k_lengths, d**-0.5)
    truth = {"causal": options["causal"], "window": options["window_size"], "softcap": options["softcap"]}
    compare(
        lambda q, k, v, s=None: kernel.flash_attn_varlen_func(
            q, k, v, ends, key_ends, max(q_lengths), max(k_lengths), alibi_slopes=on_npu, s_aux=s, **options
        ),
        lambda q, k, v, s=None: F.pad(  # what lies behind the last sequence is zero
            attention_formula.packed(q[:total], k, v, *lengths_and_scale, slopes=slopes, sinks=s, **truth),
            (0, 0, 0, 0, 0, rest),
        ),
        tensors, sinks, dtype,
    )  # fmt: skip


# ---- launches, waits, memory -----------------------------------------------------------------------------------------
def test_a_call_is_one_launch_and_no_wait(kernel: ModuleType) -> None:
    q, k, v = (t.npu() for t in draw(0, (2, 16, 4, 16), (2, 16, 2, 16), (2, 16, 2, 16)))
    sinks = torch.randn(4).npu()
    kernel.flash_attn_func(q, k, v, causal=True)  # makes the mask that all share
    for options in ({"causal": True}, {}, {"window_size": (3, 2)}, {"causal": True, "s_aux": sinks}):
        npu_counts.reset()
        kernel.flash_attn_func(q, k, v, **options)
        assert {name: n for name, n in npu_counts.read().items() if n} == {"npu_fusion_attention_v3": 1}


def test_sequences_that_fill_their_rows_are_no_copies_in_the_gradient(kernel: ModuleType) -> None:
    q, k, v = (t.npu().requires_grad_() for t in draw(0, (12, 4, 16), (12, 2, 16), (12, 2, 16)))
    result = kernel.flash_attn_varlen_func(q, k, v, [0, 5, 12], [0, 5, 12], causal=True)
    gradient = torch.ones_like(result)
    npu_counts.reset()
    torch.autograd.grad(result, (q, k, v), gradient)
    assert {name: n for name, n in npu_counts.read().items() if n} == {"npu_fusion_attention_grad_v3": 1}


def test_lengths_on_the_device_are_read_once_however_many_layers_want_them(kernel: ModuleType) -> None:
    q, k, v = (t.npu() for t in draw(0, (12, 4, 16), (12, 2, 16), (12, 2, 16)))
    ends = torch.tensor([0, 5, 12], device="npu")
    npu_counts.reset()
    for _ in range(3):
        kernel.flash_attn_varlen_func(q, k, v, ends, ends, 7, 7, causal=True)
    assert npu_counts.read()["stream_syncs"] == 1
    npu_counts.reset()
    kernel.flash_attn_varlen_func(q, k, v, [0, 5, 12], torch.tensor([0, 5, 12]), causal=True)
    assert not npu_counts.read()["stream_syncs"]


@pytest.mark.parametrize("inference", [False, True], ids=["versioned", "made in inference mode"])
def test_lengths_that_were_written_to_are_read_again(kernel: ModuleType, inference: bool) -> None:
    q, k, v = draw(0, (12, 4, 16), (12, 2, 16), (12, 2, 16))
    with torch.inference_mode(inference):
        ends = torch.tensor([0, 5, 12], device="npu")
        for lengths in ([5, 7], [2, 10]):
            ends.copy_(torch.tensor([0, *lengths]).cumsum(0))
            found = kernel.flash_attn_varlen_func(*(t.npu() for t in (q, k, v)), ends, ends, causal=True)
            expected = attention_formula.packed(*(t.double() for t in (q, k, v)), lengths, lengths, 0.25, causal=True)
            agrees(found, expected, torch.float32)


def test_more_sequences_than_a_launch_takes(kernel: ModuleType, npu_counters) -> None:
    q, k, v = draw(0, *[(1030, 1, 8)] * 3)
    leaves, exact = [t.npu().requires_grad_() for t in (q, k, v)], [t.double().requires_grad_() for t in (q, k, v)]
    found = kernel.flash_attn_varlen_func(*leaves, list(range(1031)), list(range(1031)), causal=True)
    assert npu_counters()["npu_fusion_attention_v3"] == 2
    agrees(found, v.double(), torch.float32)
    found.sum().backward()
    exact[2].sum().backward()
    agrees(leaves[2].grad, exact[2].grad, torch.float32)


# ---- one query over a cache ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 600])
def test_one_query_takes_the_operator_of_inference_and_no_mask(kernel: ModuleType, dtype, window) -> None:
    """Over more than 512 keys, behind which a mask would be wrong; keys and values are not expanded.

    The query is a long one, which looks at few keys: a mean of hundreds of values is below what may differ.
    """
    q, k, v = draw(0, (2, 1, 4, 16), (2, 700, 2, 16), (2, 700, 2, 16), dtype=dtype)
    q = 4 * q
    cached = [t.npu().transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v)]
    options = {} if window is None else {"window_size": (window - 1, 0)}
    npu_counts.reset()
    with torch.no_grad():
        found = kernel.flash_attn_func(q.npu(), *cached, causal=True, **options)
    assert launched() == {"npu_fused_infer_attention_score": 1}
    assert not {"repeat_interleave", "ones", "triu"} & npu_counts.read().keys()
    exact = (t.double() for t in (q, k, v))
    agrees(found, attention_formula.attention(*exact, 0.25, True, options.get("window_size", (-1, -1))), dtype)


# ---- dropout, determinism --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_dropout_drops_weights_and_scales_the_rest(kernel: ModuleType, softcap) -> None:
    """Values are rows of a unit matrix, so that results are weights: 64 x 64, a quarter of them dropped."""
    (q,) = draw(0, (1, 64, 2, 64))
    v = torch.eye(64).view(1, 64, 1, 64).expand(-1, -1, 2, -1).npu()
    plain = kernel.flash_attn_func(q.npu(), q.npu(), v, softcap=softcap)
    dropped = kernel.flash_attn_func(q.npu(), q.npu(), v, dropout_p=0.25, softcap=softcap)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], plain[kept] / 0.75, rtol=1e-5, atol=1e-7)
    assert 0.7 < kept.float().mean() < 0.8  # 8,192 weights: sixteen standard deviations


def test_gradients_with_dropout_are_those_of_what_was_kept(kernel: ModuleType) -> None:
    (q,) = draw(0, (1, 16, 1, 16))
    v = torch.eye(16).view(1, 16, 1, 16).npu().requires_grad_()
    out = kernel.flash_attn_func(q.npu(), q.npu(), v, dropout_p=0.5, deterministic=True)
    (grad,) = torch.autograd.grad(out.sum(), v, retain_graph=True)
    torch.testing.assert_close(grad[0, :, 0], out[0, :, 0].sum(0, keepdim=True).T.expand(-1, 16), rtol=1e-5, atol=1e-6)
    (again,) = torch.autograd.grad(out.sum(), v, create_graph=True)
    assert torch.equal(again, grad)
    with pytest.raises(NotImplementedError, match="attention with dropout has no second derivative"):
        torch.autograd.grad(again.square().sum(), v)


@pytest.mark.parametrize("before", [False, True])
def test_deterministic_gradients_are_asked_of_torch_for_their_time(kernel: ModuleType, monkeypatch, before) -> None:
    """The switch is on while the gradient is launched, and afterwards as it was."""
    seen = []
    q, k, v = (t.npu().requires_grad_() for t in draw(0, *[(1, 4, 1, 8)] * 3))

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "fusion_attention_grad" in str(function):
                seen.append(torch.are_deterministic_algorithms_enabled())
            return function(*args, **(kwargs or {}))

    torch.use_deterministic_algorithms(before)
    try:
        out = kernel.flash_attn_func(q, k, v, causal=True, deterministic=True)
        with Watch():
            out.sum().backward()
        assert seen == [True]
        assert torch.are_deterministic_algorithms_enabled() == before
    finally:
        torch.use_deterministic_algorithms(False)


# ---- refusals --------------------------------------------------------------------------------------------------------
def tensors(*shape: int) -> list[Tensor]:
    return [torch.ones(shape) for _ in range(3)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"return_attn_probs": True}, "return_attn_probs must be False"),
        ({"dropout_p": 1.0}, r"dropout_p must be in \[0, 1\)"),
        ({"s_aux": torch.ones(3)}, r"s_aux must be \[4\]"),
        ({"alibi_slopes": torch.ones(2, 3)}, r"alibi_slopes must be \[4\]"),
        ({"k": torch.ones(2, 5, 4, 6)}, "k and v must differ in head size only|one head size"),
        ({"q": torch.ones(2, 5, 8)}, r"q must be \[B, S, N, D\]"),
        ({"q": torch.ones(1, 5, 4, 8)}, "one batch size"),
        ({"k": torch.ones(2, 5, 3, 8), "v": torch.ones(2, 5, 3, 8)}, "must be a multiple of the 3 heads"),
        ({"k": torch.ones(2, 5, 4, 8).half()}, "one dtype"),
        ({"s_aux": torch.ones(4, device="meta")}, "s_aux must be on cpu as q is, got meta"),
        ({"q": torch.ones(2, 5, 4, 0), "k": torch.ones(2, 5, 4, 0)}, "one head size above 0"),
        ({"q": torch.ones(2, 5, 0, 8)}, "must be a multiple"),
        ({"q": torch.tensor(1.0)}, r"q must be \[B, S, N, D\]"),
    ],
)
def test_what_does_not_fit_is_refused(kernel: ModuleType, change, message) -> None:
    arguments = dict(zip("qkv", tensors(2, 5, 4, 8))) | change
    with pytest.raises(ValueError, match=message):
        kernel.flash_attn_func(**arguments)


@pytest.mark.parametrize(
    ("ends", "key_ends", "options", "message"),
    [
        ([0, 3, 10], [0, 10], {}, "cu_seqlens_q has 2 sequences, cu_seqlens_k has 1"),
        ([0, 7, 3], [0, 3, 10], {}, "cu_seqlens_q must ascend"),
        ([0, 11], [0, 10], {}, "cu_seqlens_q must ascend from 0 to at most 10"),
        ([1, 5, 10], [0, 5, 10], {}, "lengths of packed sequences must begin with 0, got 1, 5, 10"),
        ([0, 10], torch.tensor([-1, 10]), {}, "lengths of packed sequences must begin with 0, got -1, 10"),
        ([0, 10], [0, 10], {"softcap": -1.0}, "softcap must not be negative"),
        (torch.ones(2), [0, 10], {}, r"cu_seqlens_q must be \[1 \+ sequences\] integers"),
        (torch.tensor([False, True]), [0, 10], {}, r"cu_seqlens_q must be .* integers, got \[2\] of torch.bool"),
        ([0, 10], [0, 10], {"block_table": torch.zeros(1, 1)}, "block_table must be None"),
    ],
)
def test_lengths_and_options_that_do_not_fit_are_refused(kernel: ModuleType, ends, key_ends, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        kernel.flash_attn_varlen_func(*tensors(10, 4, 8), ends, key_ends, **options)
