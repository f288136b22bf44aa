"""npu_fusion_attention against attention in float64, its gradients against autograd through that."""

from functools import partial

import numpy as np
import pytest
import torch
import torch_npu

import softnpu
from tests.softnpu.conforming import moved
from tests.softnpu.exact_attention import TRIANGLE, arranged, attend, distance, drawn
from tests.support.rounding import assert_float64s

SCALE = 0.3
SHAPES = (2, 4, 5, 16), (2, 2, 7, 16), (2, 2, 7, 16)


def attention(*tensors: torch.Tensor, **options) -> torch.Tensor:
    return torch_npu.npu_fusion_attention_v3(*tensors, 4, "BNSD", scale=SCALE, **moved(options, "npu"))[0]


# float32 sums of up to 16 terms; bfloat16 rounds q·k inputs, the weights and the result: a few times 2^-8
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("s_q", "s_k"), [(5, 7), (7, 5), (2, 6), (6, 6)])
@pytest.mark.parametrize("mode", ["full", "all", "left up", "right down", "band", "pse"])
def test_forward_and_gradients(dtype, s_q, s_k, mode) -> None:
    tensors = drawn((2, 4, s_q, 16), *[(2, 2, s_k, 16)] * 2, dtype=dtype)
    far, shifted, some = distance(s_q, s_k), distance(s_q, s_k, s_k - s_q), torch.rand(2, 1, s_q, s_k) < 0.4
    some[..., 0] = False
    pse = torch.randn(2, 4, s_q, s_k).to(dtype) if mode == "pse" else 0
    causal, band = {"atten_mask": TRIANGLE, "next_tockens": 0}, {"pre_tockens": 2, "next_tockens": 1}
    options, hidden = {
        "full": ({}, None),
        "all": ({"atten_mask": some, "sparse_mode": 1}, some),
        "left up": (causal | {"sparse_mode": 2}, far > 0),
        "right down": (causal | {"sparse_mode": 3}, shifted > 0),
        # with more queries than keys some rows see nothing
        "band": (causal | band | {"sparse_mode": 4, "inner_precise": 2}, (shifted < -2) | (shifted > 1)),
        "pse": ({"pse": pse}, None),
    }[mode]
    assert_float64s(partial(attention, **options), lambda *t: attend(*t, hidden, pse)[0], tensors, TOLERANCE[dtype])


@pytest.mark.parametrize("layout", ["BSND", "BSH", "SBH"])
def test_layouts(layout) -> None:
    assert_float64s(
        lambda *t: torch_npu.npu_fusion_attention(*(arranged(x, layout) for x in t), 4, layout, scale=SCALE)[0],
        lambda *t: arranged(attend(*t)[0], layout),
        drawn(*SHAPES),
        TOLERANCE[torch.float32],
    )


def test_gradients_of_parts_of_the_keys_add_up_with_the_statistics_of_all() -> None:
    """As in a ring of devices: each launch gets the result and the statistics of the whole rows."""
    q, k, v = drawn((1, 4, 5, 16), *[(1, 2, 7, 16)] * 2)
    expected, _ = attend(*(leaves := [t.double().requires_grad_() for t in (q, k, v)]))
    grad = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    expected.backward(grad.double())
    q, k, v, grad = (t[0].transpose(0, 1).contiguous().npu() for t in (q, k, v, grad))

    def lengths(key: torch.Tensor) -> dict[str, list[int]]:
        return {"actual_seq_qlen": [5], "actual_seq_kvlen": [len(key)]}

    out, maximum, total, *_ = torch_npu.npu_fusion_attention(q, k, v, 4, "TND", scale=SCALE, **lengths(k))
    saved = {"softmax_max": maximum, "softmax_sum": total, "attention_in": out, "scale_value": SCALE}
    parts = [
        torch_npu.npu_fusion_attention_grad(q, *kv, grad, 4, "TND", **saved, **lengths(kv[0]))[:3]
        for kv in zip(k.split(4), v.split(4))
    ]
    found = parts[0][0] + parts[1][0], *(torch.cat(halves) for halves in list(zip(*parts))[1:])
    for tensor, leaf in zip(found, leaves):
        tensor = tensor.cpu().double().transpose(0, 1)[None]
        torch.testing.assert_close(tensor, leaf.grad, rtol=0, atol=4 * TOLERANCE[torch.float32])


@pytest.mark.parametrize("given", ["generator", "seed", "dropout_mask"])
def test_the_dropout_mask_is_the_one_that_torch_npu_makes_of_seed_and_offset(given) -> None:
    q, k, v = (torch.randn(1, 2, 16, 16).npu() for _ in range(3))
    torch.npu.manual_seed(7)
    mask = torch_npu._npu_dropout_gen_mask(q, [2 * 16 * 16], p=1 - 0.75, seed=7, offset=0, parallel=True, sync=False)
    kept = np.unpackbits(mask.cpu().numpy(), bitorder="little").reshape(1, 2, 16, 16)
    options = {"generator": {}, "seed": {"seed": 7}, "dropout_mask": {"seed": 7, "dropout_mask": mask}}[given]
    if given == "seed":
        torch.npu.manual_seed(8)  # has no part in it
    v.requires_grad_()
    out, *_, seed, offset, _ = torch_npu.npu_fusion_attention(q, k, v, 2, "BNSD", keep_prob=0.75, **options)
    weights = torch.softmax(q.cpu().double() @ k.cpu().double().mT, -1) * torch.tensor(kept) / 0.75
    torch.testing.assert_close(out.detach().cpu().double(), weights @ v.detach().cpu().double(), rtol=1e-5, atol=1e-5)
    assert (seed, offset) == (7, 0)
    out.sum().backward()  # which makes the mask again
    torch.testing.assert_close(v.grad.cpu().double(), weights.mT @ torch.ones(16, 16).double(), rtol=1e-5, atol=1e-5)


def test_a_sequence_without_queries_and_keys_has_no_rows_and_no_gradients() -> None:
    x, ends, dense = torch.randn(5, 2, 16).npu().requires_grad_(), [2, 2, 5], [2, 5]
    out, other = (
        torch_npu.npu_fusion_attention(x, x, x, 2, "TND", actual_seq_qlen=e, actual_seq_kvlen=e)[0]
        for e in (ends, dense)
    )
    assert torch.equal(out, other)
    (found,), (expected,) = (torch.autograd.grad(y.square().sum(), x) for y in (out, other))
    assert torch.equal(found, expected)
    keys = torch.randn(6, 2, 16).npu().requires_grad_()  # one of them belongs to no query
    out = torch_npu.npu_fusion_attention(
        x.detach(), keys, keys, 2, "TND", actual_seq_qlen=ends, actual_seq_kvlen=[2, 3, 6]
    )[0]
    out.sum().backward()
    assert not keys.grad[2].any()


def test_version_3_takes_lengths_on_the_host_only() -> None:
    x, ends = torch.ones(5, 2, 16, dtype=torch.half).npu(), torch.tensor([2, 5])
    torch_npu.npu_fusion_attention_v3(x, x, x, 2, "TND", actual_seq_qlen=ends, actual_seq_kvlen=ends)
    with pytest.raises(RuntimeError, match="tensor must be on CPU, actual_seq_kvlen is on npu:0"):
        torch_npu.npu_fusion_attention_v3(x, x, x, 2, "TND", actual_seq_qlen=ends, actual_seq_kvlen=ends.npu())


def test_rows_that_see_nothing() -> None:
    tensors = drawn(*SHAPES)
    hidden = torch.zeros(2, 1, 5, 7, dtype=torch.bool)
    hidden[0, 0, 2] = True
    expected, _ = attend(*tensors, hidden)
    given = [t.npu() for t in tensors]
    found = attention(*given, atten_mask=hidden, inner_precise=2)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=2e-6, atol=2e-6)
    with pytest.warns(UserWarning, match="nothing to attend to"):
        found = attention(*given, atten_mask=hidden)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=2e-6, atol=2e-6)
    with softnpu.poisoned_memory(), pytest.warns(UserWarning, match="nothing to attend to"):
        found = attention(*given, atten_mask=hidden)
    assert found[0, :, 2].isnan().all()
    assert not found[1].isnan().any()
