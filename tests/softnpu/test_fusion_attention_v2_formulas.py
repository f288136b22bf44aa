"""npu_fusion_attention_v2: rotary parts, position biases, prefixes and windows of one sequence, against float64."""

import pytest
import torch
import torch_npu

from tests.softnpu.conforming import moved
from tests.softnpu.exact_attention import TRIANGLE, attend, distance, drawn, sequences
from tests.support.rounding import assert_float64s

RECTANGLE = (torch.arange(2048) >= 1024).expand(1024, 2048)
SCALE = 0.3
TOLERANCE = 5e-6  # float32 sums of up to 16 terms, and of up to 40 in gradients


def check(tensors, names, layout, formula, **options) -> None:
    """Compare a call with ``tensors``, the first of them query, key and value, the others of these names."""

    def call(*given: torch.Tensor) -> torch.Tensor:
        named = dict(zip(names, given[3:])) | moved(options, "npu")
        return torch_npu.npu_fusion_attention_v2(*given[:3], 4, layout, scale=SCALE, **named)[0]

    assert_float64s(call, formula, tensors, TOLERANCE)


def ends(lengths) -> list[int]:
    return torch.tensor(lengths).cumsum(0).tolist()


def test_rotary_parts_are_scored_beside_query_and_key() -> None:
    lengths = [3, 2]
    tensors = drawn((5, 4, 16), (5, 2, 16), (5, 2, 16), (5, 4, 8), (5, 2, 8))
    given = {"actual_seq_qlen": ends(lengths), "actual_seq_kvlen": ends(lengths)}
    check(tensors, ["query_rope", "key_rope"], "TND", sequences(lengths, lengths), **given)


@pytest.mark.parametrize(("pse_type", "shape"), [(0, (2, 4, 5, 7)), (1, (1, 4, 5, 7)), (1, (2, 4, 1, 7))])
def test_position_biases_are_added_before_or_after_the_scaling(pse_type, shape) -> None:
    tensors, pse = drawn((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)), torch.randn(shape)
    biases = (pse, 0) if pse_type else (0, pse)
    check(tensors, [], "BNSD", lambda *t: attend(*t, None, *biases)[0], pse=pse, pse_type=pse_type)


@pytest.mark.parametrize("pse_type", [2, 3])
@pytest.mark.parametrize("of_batch", [False, True])
def test_slopes_make_a_bias_of_distances(pse_type, of_batch) -> None:
    tensors = drawn((2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8))
    slopes = torch.rand(2, 4) if of_batch else torch.rand(4)
    far = distance(6, 6, -3).abs().double()  # kv_start_idx - q_start_idx = 3
    biases = -slopes.double().expand(2, 4)[..., None, None] * (far.sqrt() if pse_type == 3 else far)
    options = {"pse": slopes, "pse_type": pse_type, "q_start_idx": [1], "kv_start_idx": [4]}
    check(tensors, [], "BNSD", lambda *t: attend(*t, None, 0, biases)[0], **options)


def test_the_last_rows_of_an_alibi_bias_stand_for_all() -> None:
    s = 1030
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, s, 8).unbind(0)
    whole = distance(s, s).double() * torch.tensor([0.5, 0.25, 0.125, 0.0625]).view(4, 1, 1).double()
    found = torch_npu.npu_fusion_attention_v2(
        *(t.to("npu") for t in (q, k, v)), 4, "BNSD", scale=SCALE, atten_mask=TRIANGLE.to("npu"), sparse_mode=2,
        pse=whole[None, :, -1024:].float().to("npu"),
    )[0]  # fmt: skip
    expected, _ = attend(q, k, v, distance(s, s) > 0, whole)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-4, atol=1e-4)  # scores near 100 in float32


def test_packed_position_biases_of_several_sequences() -> None:
    q_lengths, k_lengths = [3, 2], [4, 3]
    tensors = drawn((5, 4, 8), (7, 2, 8), (7, 2, 8))
    biases = [torch.randn(4, q, k) for q, k in zip(q_lengths, k_lengths)]
    given = {"actual_seq_qlen": ends(q_lengths), "actual_seq_kvlen": ends(k_lengths)}
    truth = sequences(q_lengths, k_lengths, before=lambda i: biases[i].double())
    check(tensors, [], "TND", truth, pse=torch.cat([b.flatten() for b in biases]), **given)


@pytest.mark.parametrize("compressed", [False, True])
def test_a_prefix_is_seen_by_every_query(compressed) -> None:
    tensors = drawn((2, 4, 4, 8), (2, 2, 6, 8), (2, 2, 6, 8))
    prefix = [3, 5]
    hidden = (distance(4, 6) > 2) & (torch.arange(6) >= torch.tensor(prefix).view(2, 1, 1, 1))
    mask = torch.cat([TRIANGLE, RECTANGLE]) if compressed else hidden
    options = {"atten_mask": mask, "sparse_mode": 6 if compressed else 5, "prefix": prefix}
    check(tensors, [], "BNSD", lambda *t: attend(*t, hidden)[0], **options)


@pytest.mark.parametrize(
    ("mode", "q_lengths", "k_lengths", "window", "hidden"),
    [  # the cuts that the documentation of the operator shows
        (7, [3, 2], [3, 6], (6, -2), lambda i: distance(*((3, 3), (2, 6))[i], (0, 4)[i] - 2 * i) > 0),
        (8, [3, 5, 4], [4, 5, 4], (4, 1), lambda i: distance(*((3, 4), (5, 5), (4, 4))[i], (2, 0, 0)[i]) > 0),
        (6, [3, 2], [3, 4], (0, 0), lambda i: (distance(3 - i, 3 + i, 2 * i) > 0) & (torch.arange(3 + i) >= 2)),
    ],
)  # fmt: skip
def test_sequences_that_were_cut(mode, q_lengths, k_lengths, window, hidden) -> None:
    tensors = drawn((sum(q_lengths), 4, 8), (sum(k_lengths), 2, 8), (sum(k_lengths), 2, 8))
    given = {"actual_seq_qlen": ends(q_lengths), "actual_seq_kvlen": ends(k_lengths), "sparse_mode": mode}
    if mode == 6:
        given |= {"prefix": [2, 2], "atten_mask": torch.cat([TRIANGLE, RECTANGLE])}
    else:
        given |= {"pre_tokens": window[0], "next_tokens": window[1], "atten_mask": TRIANGLE}
    check(tensors, [], "TND", sequences(q_lengths, k_lengths, hidden), **given)


def test_the_gradient_of_a_position_bias_is_not_computed() -> None:
    q, k, v = (t.to("npu") for t in drawn((1, 4, 3, 8), (1, 4, 3, 8), (1, 4, 3, 8)))
    pse = torch.zeros(1, 4, 3, 3, device="npu", requires_grad=True)
    torch_npu.npu_fusion_attention_v2(q, k, v, 4, "BNSD", pse=pse)[0].sum().backward()
    assert pse.grad.isnan().all()
