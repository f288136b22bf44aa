"""npu_lightning_indexer, its loss, and npu_sparse_flash_attention against float64."""

import pytest
import torch
import torch_npu
from torch import Tensor

from tests.softnpu.exact_attention import drawn
from tests.softnpu.given import HALF, INT, index
from tests.support.rounding import assert_float64s

HEADS, QUERIES, KEYS = 8, 5, 11
PACKED = {"layout_query": "TND", "layout_key": "TND"}
BEHIND = torch.ones(QUERIES, KEYS, dtype=torch.bool).triu(KEYS - QUERIES + 1)


def indexed(weights: torch.dtype = torch.float32) -> list[Tensor]:
    q, k, w = drawn((2, QUERIES, HEADS, 128), (2, KEYS, 1, 128), (2, QUERIES, HEADS), dtype=HALF)
    return [q, k, w.to(weights)]


def attended() -> list[Tensor]:
    sizes = [(2, n, heads, d) for d in (512, 64) for n, heads in ((QUERIES, HEADS), (KEYS, 1))]
    return [0.3 * tensor for tensor in drawn(*sizes, dtype=HALF)]


def lengths(of_queries: list[int], of_keys: list[int]) -> dict[str, Tensor]:
    query, key = index(*of_queries, dtype=INT), index(*of_keys, dtype=INT)
    return {"actual_seq_lengths_query": query, "actual_seq_lengths_key": key}


def sparse_scores(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("bqnd,bkd->bqnk", q.double(), k[:, :, 0].double()).relu().mul(w.double().unsqueeze(-1)).sum(2)


@pytest.mark.parametrize("mode", [0, 3])
def test_an_indexer_chooses_what_scores_highest_and_its_gradient_is_that_of_scores(mode: int) -> None:
    given = indexed(torch.bfloat16)
    leaves, exact = [t.npu().requires_grad_() for t in given], [t.double().requires_grad_() for t in given]
    scores = sparse_scores(*exact)
    if mode == 3:
        scores = scores.masked_fill(BEHIND, -torch.inf)
    options = {"sparse_count": 9, "sparse_mode": mode, "return_value": True}
    indices, values = torch_npu.npu_lightning_indexer(*leaves, **options)
    expected = scores.topk(9)
    wanted = expected.indices.masked_fill(expected.values == -torch.inf, -1)
    assert torch.equal(indices.cpu()[:, :, 0].long(), wanted)
    there = wanted >= 0
    assert there.all() == (mode == 0)
    # rounded to bfloat16 once
    torch.testing.assert_close(
        values.detach().cpu()[:, :, 0].double()[there], expected.values.detach()[there], rtol=2**-8, atol=1e-4
    )
    grad = torch.randn(values.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    values.backward(grad.npu())
    (expected.values.masked_fill(~there, 0.0) * grad[:, :, 0].double()).sum().backward()
    for leaf, truth in zip(leaves, exact):  # rounded to bfloat16 once
        assert (leaf.grad.cpu().double() - truth.grad).norm() <= 2**-8 * truth.grad.norm()


def test_lengths_and_packed_sequences_are_those_of_each_sequence() -> None:
    q, k, w = (t.npu() for t in indexed())
    alone = torch_npu.npu_lightning_indexer(q[1:, :3].contiguous(), k[1:, :7].contiguous(), w[1:, :3].contiguous())[0]
    found = torch_npu.npu_lightning_indexer(q, k, w, **lengths([5, 3], [11, 7]))[0]
    assert torch.equal(found[1, :3], alone[0])
    assert (found[1, 3:] == -1).all()
    packed = [torch.cat((t[0], t[1, :n])) for t, n in ((q, 3), (k, 7), (w, 3))]
    found = torch_npu.npu_lightning_indexer(*packed, **lengths([5, 8], [11, 18]), **PACKED)[0]
    assert torch.equal(found[5:], alone[0])


def test_sequences_without_queries_leave_their_keys_out() -> None:
    """As CANN's documents allow: in the layout TND a length is no less than that before it."""
    q, k, w = (t[:1].npu() for t in indexed())
    alone = torch_npu.npu_lightning_indexer(q, k[:, 2:9].contiguous(), w, sparse_count=4)[0][0]
    packed = [t[0] for t in (q, k, w)]

    def found(ends: list[int], key_ends: list[int]) -> Tensor:
        return torch_npu.npu_lightning_indexer(*packed, **lengths(ends, key_ends), **PACKED, sparse_count=4)[0].cpu()

    assert torch.equal(found([0, QUERIES, QUERIES], [2, 9, KEYS]), alone.cpu())
    without_keys = found([2, QUERIES], [0, KEYS])
    assert (without_keys[:2] == -1).all()
    assert (without_keys[2:] >= 0).all()
    unwritten = found([QUERIES, QUERIES], [0, KEYS])  # no sequence has both
    assert (unwritten > KEYS).all()
    assert (found([2], [KEYS])[2:] > KEYS).all()  # in no sequence
    with pytest.raises(RuntimeError, match="sums of all so far"):
        found([3, 2], [5, KEYS])
    with pytest.raises(RuntimeError, match="as many lengths"):
        found([3], [5, KEYS])


@pytest.mark.parametrize("mode", [0, 3])
def test_attention_is_to_chosen_keys_and_so_is_its_gradient(mode: int) -> None:
    q, k, q_rope, k_rope = attended()
    others = 1 + torch.rand(2, QUERIES, KEYS - 1, generator=torch.Generator().manual_seed(2)).topk(5).indices
    chosen = torch.cat((torch.zeros_like(others[..., :1]), others), dim=-1)  # the first key is seen by all
    chosen[0, :, 4:] = -1
    seen = torch.zeros(2, QUERIES, KEYS, dtype=torch.bool)
    seen[0].scatter_(-1, chosen[0, :, :4], True)
    seen[1].scatter_(-1, chosen[1], True)
    if mode == 3:
        seen &= ~BEHIND
    sums = []

    def attend(q: Tensor, k: Tensor, v: Tensor, *ropes: Tensor) -> Tensor:
        out, maximum, total = torch_npu.npu_sparse_flash_attention(
            q, k, v, chosen.int().unsqueeze(2).npu(), 0.1, query_rope=ropes[0], key_rope=ropes[1], sparse_mode=mode,
            attention_mode=2, return_softmax_lse=True,
        )  # fmt: skip
        sums.append((maximum + total.log()).detach().cpu()[:, 0].double())
        return out

    def exact(q: Tensor, k: Tensor, v: Tensor, *ropes: Tensor) -> Tensor:
        scores = torch.cat((q, ropes[0]), -1) @ torch.cat((k, ropes[1]), -1).permute(0, 2, 3, 1) * 0.1
        scores = scores.masked_fill(~seen.unsqueeze(2), -torch.inf)
        assert (sums[0] - scores.detach().logsumexp(-1)).abs().max() <= 1e-5  # float32 sums of 576
        return scores.softmax(-1) @ v[:, None, :, 0]

    assert_float64s(attend, exact, (q, k, k, q_rope, k_rope), 2**-7)  # rounded twice


@pytest.mark.parametrize("keys", [9, 1030])  # all that a query sees, or 1024 of them
def test_the_loss_of_an_indexer_and_its_gradients(keys: int) -> None:
    generator, queries, heads, index_heads, count = torch.Generator().manual_seed(3), 3, 32, 8, 1024
    shapes = (queries, heads, 512), (keys, 1, 512), (queries, heads, 64), (keys, 1, 64)
    shapes += (queries, index_heads, 128), (keys, 1, 128), (queries, index_heads)
    given = [torch.randn(1, *shape, generator=generator).bfloat16() for shape in shapes]
    q, k, q_rope, k_rope, index_q, index_k, w = [each.double() for each in given]
    chosen = torch.full((1, queries, 1, count), -1, dtype=torch.int32)
    hidden = torch.ones(queries, keys, dtype=torch.bool)
    for row in range(queries):
        seen = torch.randperm(keys - queries + row + 1, generator=generator)[:count]
        chosen[0, row, 0, : len(seen)] = seen
        hidden[row, seen] = False
    scores = torch.einsum("bqnd,bkd->bqnk", torch.cat((q, q_rope), -1), torch.cat((k, k_rope), -1)[:, :, 0]) * 0.05
    scores = scores.masked_fill(hidden.unsqueeze(1), -torch.inf)
    maximum, paid = scores.amax(-1), scores.softmax(-1).mean(2)
    total = (scores - maximum.unsqueeze(-1)).exp().sum(-1)
    indexer = [(0.1 * each).bfloat16().double().requires_grad_() for each in (index_q, index_k, w)]
    products = torch.einsum("bqhd,bkd->bqhk", indexer[0], indexer[1][:, :, 0]).relu()
    log = torch.einsum("bqh,bqhk->bqk", indexer[2], products).masked_fill(hidden, -torch.inf).log_softmax(-1)
    wanted = torch.nn.functional.kl_div(log.masked_fill(hidden, 0), paid, reduction="sum")
    wanted.backward()
    leaves = [each.detach().bfloat16().npu() for each in indexer]
    found = torch.ops.npu.npu_sparse_lightning_indexer_grad_kl_loss(
        *(each.npu() for each in given[:2]), *leaves, chosen.npu(),
        *(each.unsqueeze(1).float().npu() for each in (maximum, total)), 0.05,
        query_rope=given[2].npu(), key_rope=given[3].npu(), sparse_mode=3,
    )  # fmt: skip
    for ours, truth in zip(found, (*(each.grad for each in indexer), wanted.detach()), strict=True):
        assert (ours.cpu().double() - truth).norm() <= 2**-8 * truth.norm()  # rounded to bfloat16 once
