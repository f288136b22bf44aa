"""What a release of CANN does with sinks: its gradients against float64, what it refuses, and what it never writes."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor

from softnpu.cann import CANN
from tests.softnpu.exact_attention import TRIANGLE, arranged, attend, distance, drawn, sequences
from tests.softnpu.given import half, npu

pytestmark = pytest.mark.software
SCALE = 0.3
TOLERANCE = 2e-2  # bfloat16 rounds products, weights and results: a few times 2^-8 of values about one
NEVER = (99, 0)


def taken() -> AbstractContextManager:
    """Expect that a release without sinks refuses them."""
    if CANN >= (8, 5):
        return nullcontext()
    return pytest.raises(RuntimeError, match="The param sink is not supported in this CANN version")


@pytest.fixture
def deterministic():
    """Switches deterministic algorithms on, without an import of Inductor, which takes seconds in each process."""
    torch.set_deterministic_debug_mode("error")
    yield
    torch.set_deterministic_debug_mode("default")


def gradients(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor, grad: Tensor, layout: str, **options: Any
) -> tuple[Tensor, ...]:
    """Call version 1, forward and backward, with tensors of the CPU."""
    heads = len(sink)
    q, k, v, sink, grad = (t.npu() for t in (q, k, v, sink, grad))
    options = {name: value.npu() if isinstance(value, Tensor) else value for name, value in options.items()}
    out, maximum, total, _, seed, offset, numels = torch_npu.npu_fusion_attention(
        q, k, v, heads, layout, scale=SCALE, sink=sink, **options
    )
    saved = {"softmax_max": maximum, "softmax_sum": total, "attention_in": out, "scale_value": SCALE, "sink": sink}
    random = {"seed": seed, "offset": offset, "numels": numels}
    found = torch_npu.npu_fusion_attention_grad(q, k, v, grad, heads, layout, **saved, **random, **options)
    return found[0], found[1], found[2], found[4]


def exact(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, grad: Tensor, hidden: Tensor | None) -> tuple[Tensor, ...]:
    leaves = [t.double().requires_grad_() for t in (q, k, v, sink)]
    out, _ = attend(*leaves[:3], hidden, sink=leaves[3], scale=SCALE)
    return torch.autograd.grad(out, leaves, grad.double())


# layout, size of heads, queries, mode, other options, since which release deterministic gradients leave dsink out
TEMPLATES = {
    "BNSD": ("BNSD", 64, 6, 3, {}, (9, 0)),
    "BNSD without a mask": ("BNSD", 64, 6, 0, {}, (9, 0)),
    "BNSD with a mask": ("BNSD", 64, 6, 1, {}, (9, 0)),
    "BSH": ("BSH", 64, 6, 3, {}, (9, 0)),
    "SBH": ("SBH", 64, 6, 3, {}, (9, 0)),
    "TND": ("TND", 64, 6, 3, {}, (8, 5)),
    "TND without a mask": ("TND", 128, 6, 0, {}, (8, 5)),
    "TND with a mask": ("TND", 128, 6, 1, {}, (8, 5)),
    "heads that are filled up": ("TND", 40, 6, 3, {}, (8, 5)),
    "BSH that becomes BSND": ("BSH", 40, 6, 3, {}, NEVER),
    "BSND": ("BSND", 64, 6, 3, {}, NEVER),
    "fewer queries than keys": ("BNSD", 64, 5, 3, {}, NEVER),
    "larger heads": ("TND", 144, 6, 3, {}, NEVER),
    "from the upper left": ("TND", 64, 6, 2, {}, NEVER),
    "a band": ("TND", 64, 6, 4, {"next_tockens": 0}, NEVER),
    "dropout": ("TND", 64, 6, 3, {"keep_prob": 0.5}, NEVER),
    "position biases": ("BNSD", 64, 6, 3, {"pse": torch.zeros(1, 4, 6, 6).bfloat16()}, NEVER),
}


def template_loss(name: str) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...] | None]:
    """Return what the device computes, and the truth where nothing is dropped at random."""
    layout, size, queries, mode, others, _ = TEMPLATES[name]
    torch.manual_seed(0)
    tensors = drawn((1, 4, queries, size), *[(1, 2, 6, size)] * 2, (1, 4, queries, size), dtype=torch.bfloat16)
    q, k, v, grad = (t * size**-0.25 for t in tensors)
    sink, far = torch.randn(4), distance(queries, 6, 6 - queries) > 0
    options = others | {"sparse_mode": mode}
    if mode:
        options["atten_mask"] = far if mode == 1 else TRIANGLE
    if layout == "TND":
        options |= {"actual_seq_qlen": [queries], "actual_seq_kvlen": [6]}
        arrange = lambda t: t[0].transpose(0, 1).contiguous()  # noqa: E731
    else:
        arrange = lambda t: arranged(t, layout)  # noqa: E731
    found = gradients(*(arrange(t) for t in (q, k, v)), sink, arrange(grad), layout, **options)
    if "keep_prob" in others:
        return found, None
    *expected, of_sink = exact(q, k, v, sink, grad, far if mode else None)
    return found, (*(arrange(t) for t in expected), of_sink)


@pytest.mark.parametrize("name", TEMPLATES)
def test_gradients_with_a_sink(name) -> None:
    with taken():
        found, expected = template_loss(name)
        assert not found[3].isnan().any()
        for one, truth in zip(found, expected or ()):
            torch.testing.assert_close(one.cpu().double(), truth, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_deterministic_template_leaves_the_gradient_of_a_sink_unwritten(name, deterministic) -> None:
    """And no other."""
    with taken():
        found, expected = template_loss(name)
        is_written = TEMPLATES[name][-1] > CANN
        assert found[3].isnan().all() == (not is_written)
        for one, truth in zip(found[: 4 if is_written else 3], expected or ()):
            torch.testing.assert_close(one.cpu().double(), truth, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("count", [1023, 1024])
def test_sums_of_a_sink_are_lost_where_no_piece_has_a_rest(count) -> None:
    """1,024 sequences, of which the longest have two blocks of 256 queries and of keys, are 32 bytes · 4,096 a head."""
    with taken():
        lengths = [1] * (count - 1) + [300]
        ends = torch.tensor(lengths).cumsum(0).tolist()
        q, k, v, grad = drawn(*[(sum(lengths), 1, 16)] * 4, dtype=torch.bfloat16)
        options = {"actual_seq_qlen": ends, "actual_seq_kvlen": ends, "sparse_mode": 3, "atten_mask": TRIANGLE}
        found = gradients(q, k, v, torch.zeros(1), grad, "TND", **options)
        assert found[3].isnan().all() == (CANN < (9, 1) and count == 1024)
        assert not any(gradient.isnan().any() for gradient in found[:3])


def test_float32_is_refused_in_the_gradient_alone() -> None:
    with taken():
        q, k, v, grad = drawn(*[(1, 2, 5, 16)] * 4)
        torch_npu.npu_fusion_attention(q.npu(), k.npu(), v.npu(), 2, "BNSD", sink=npu(2))
        with pytest.raises(RuntimeError, match="FAG with sinkInOptional do not support tensor with datatype Float32"):
            gradients(q, k, v, torch.zeros(2), grad, "BNSD")


@pytest.mark.parametrize("operator", ["npu_fusion_attention", "npu_fusion_attention_v3"])
def test_sinks_are_taken_since_a_release(operator) -> None:
    x = half(1, 2, 5, 16)
    with taken():
        getattr(torch_npu, operator)(x, x, x, 2, "BNSD", sink=npu(2))


def test_a_mask_is_that_of_the_longest_of_a_launch() -> None:
    """Not of other launches."""
    x, ends = half(5, 2, 16), {"actual_seq_qlen": [2, 5], "actual_seq_kvlen": [2, 5]}
    mask = torch.ones(4, 4, dtype=torch.bool).triu(1)
    options = ends | {"sparse_mode": 1}
    torch_npu.npu_fusion_attention(x, x, x, 2, "TND", atten_mask=mask[:3, :3].npu(), **options)
    with pytest.raises(RuntimeError, match=r"supported atten_mask shape is \[MaxSq, MaxSkv\] = \[3, 3\], got \[4, 4\]"):
        torch_npu.npu_fusion_attention(x, x, x, 2, "TND", atten_mask=mask.npu(), **options)


def test_statistics_of_packed_sequences_lie_head_by_head_in_each() -> None:
    """Unless they are asked for token by token; from both, gradients are the same."""
    lengths, ends = [2, 3], [2, 5]
    torch.manual_seed(0)
    q, k, v, grad = drawn(*[(5, 2, 16)] * 4)
    given = {"actual_seq_qlen": ends, "actual_seq_kvlen": ends}
    q, k, v, grad = (t.npu() for t in (q, k, v, grad))
    results = []
    for layout in ("", "TND") if CANN >= (8, 3) else ("",):
        chosen = {"softmax_layout": layout} if layout else {}
        out, maximum, total, *_ = torch_npu.npu_fusion_attention(q, k, v, 2, "TND", scale=SCALE, **given, **chosen)
        saved = {"softmax_max": maximum, "softmax_sum": total, "attention_in": out, "scale_value": SCALE}
        found = torch_npu.npu_fusion_attention_grad(q, k, v, grad, 2, "TND", **saved, **given, **chosen)[:3]
        results.append((maximum.cpu(), found))
    scores = sequences(lengths, lengths)  # the truth of the results
    torch.testing.assert_close(out.cpu().double(), scores(q.cpu(), k.cpu(), v.cpu()), rtol=2e-6, atol=2e-6)
    rows = [
        (a.transpose(0, 1).float() @ b.permute(1, 2, 0).float() * SCALE).amax(-1)
        for a, b in zip(q.cpu().split(lengths), k.cpu().split(lengths))
    ]
    by_head = torch.cat([row.flatten() for row in rows])
    torch.testing.assert_close(results[0][0][..., 0].flatten(), by_head, rtol=2e-6, atol=2e-6)
    for maximum, found in results[1:]:
        torch.testing.assert_close(maximum[..., 3], torch.cat(rows, 1).T, rtol=2e-6, atol=2e-6)
        assert all(torch.equal(*pair) for pair in zip(found, results[0][1]))
