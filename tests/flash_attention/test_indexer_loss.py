"""The loss of an indexer and its gradients, against autograd through scores of all queries and keys in float64."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.flash_attention.test_sparse_keys import BATCH, COUNT, KEYS, MASKS, QUERIES, drawn, masks, parts  # noqa: F401
from tests.support.memory import Largest

BOOL_MASKS = [name for name in MASKS if name != "added"]
SCALE, INDEX_SCALE = 0.2, 0.3


def shapes(queries: int, keys: int, heads: int = 4, key_heads: int = 1, size: int = 24) -> list[tuple[int, ...]]:
    """Sizes of query, key, index_query, index_key and weights."""
    index = (BATCH, queries, 3, 16), (BATCH, keys, 16), (BATCH, queries, 3)
    return [(BATCH, queries, heads, size), (BATCH, keys, key_heads, size), *index]


def plain_loss(
    query: Tensor, key: Tensor, q: Tensor, k: Tensor, w: Tensor, seen: Tensor, scale: float, index_scale: float
) -> Tensor:
    """Return the divergence of each query, ``[B, S_q]``, of what is seen, ``[B, S_q, S_k]``; zero if it is nothing."""
    group = query.shape[2] // key.shape[2]
    scores = torch.einsum("bqnd,bknd->bnqk", query, key.repeat_interleave(group, 2)) * scale
    paid = scores.masked_fill(~seen.unsqueeze(1), -1e300).softmax(-1).sum(1)
    target = (paid / paid.sum(-1, keepdim=True)).detach()
    scores = torch.einsum("bqhd,bkd->bqhk", q, k).mul(index_scale).relu()
    log = torch.einsum("bqh,bqhk->bqk", w, scores).masked_fill(~seen, -1e300).log_softmax(-1)
    return torch.nn.functional.kl_div(log, target, reduction="none").masked_fill(~seen, 0).sum(-1)


def chosen_and_seen(seen: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Choose keys by chance, those that are seen first; return them, and which keys are both."""
    seen = seen[:, 0].expand(BATCH, -1, -1)
    drawn = torch.rand(seen.shape, generator=torch.Generator().manual_seed(1)).masked_fill(~seen, -1)
    indices = drawn.topk(count).indices.int()
    return indices, seen & torch.zeros_like(seen).scatter(-1, indices.long(), True)


def compare(kernel: ModuleType, given: list[Tensor], mask, seen: Tensor, tolerance: float, **options) -> None:
    """Compare the loss and the gradients of what belongs to the indexer, each by the largest number of its truth."""
    leaves, exact = [t.npu().requires_grad_() for t in given], [t.double().requires_grad_() for t in given]
    counted = options.get("counted")
    loss = kernel.indexer_loss(*leaves, mask, SCALE, index_scale=INDEX_SCALE, **options)
    wanted = plain_loss(*exact, seen, SCALE, INDEX_SCALE)
    wanted = (wanted if counted is None else wanted * counted.cpu()).sum()
    assert (loss.dtype, loss.shape) == (torch.float32, ())
    assert abs(loss.item() - wanted.item()) <= tolerance * wanted.item()
    (loss * 3).backward()
    (wanted * 3).backward()
    assert leaves[0].grad is leaves[1].grad is None  # the attention is no part of it
    for leaf, truth in zip(leaves[2:], exact[2:]):
        assert leaf.grad.dtype == leaf.dtype
        assert (leaf.grad.cpu().double() - truth.grad).norm() <= tolerance * truth.grad.norm()


@pytest.mark.parametrize("key_heads", [1, 2], ids="{} heads of keys".format)
@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "of chosen keys"])
@pytest.mark.parametrize("name", BOOL_MASKS)
def test_it_is_what_float64_gives(kernel, parts, name: str, is_sparse: bool, key_heads: int) -> None:  # noqa: F811
    """In float32, sums of at most 24 numbers and softmax of at most 13: 2^-19 of the norm."""
    mask, seen = masks(kernel)[name]
    given, options = drawn(*shapes(QUERIES, KEYS, key_heads=key_heads)), {}
    seen_of_all = seen[:, 0].expand(BATCH, -1, -1)
    if is_sparse:
        indices, seen_of_all = chosen_and_seen(seen, COUNT)
        options["indices"] = indices.npu()
    compare(kernel, given, mask, seen_of_all, 2**-19, **options)


def test_queries_of_padding_need_not_count(kernel: ModuleType) -> None:
    mask, seen = masks(kernel)["padded"]
    counted = torch.ones(BATCH, QUERIES, dtype=torch.bool)
    counted[1, 6:] = False
    compare(kernel, drawn(*shapes(QUERIES, KEYS)), mask, seen[:, 0], 2**-19, counted=counted.npu())


def test_an_indexer_that_scores_as_attention_does_has_no_loss(kernel: ModuleType) -> None:
    """One head each, with the logarithm of the weights as scores: of 13 weights, each within 2^-23."""
    (key,) = drawn((1, KEYS, 1, 16))
    key = key.abs()
    query = drawn((1, KEYS, 1, 16))[0].abs()  # the scores are positive: relu changes none
    mask = kernel.attention_mask(1, KEYS, KEYS, device="npu")
    given = query.npu(), key.npu(), query.npu(), key[:, :, 0].npu(), torch.ones(1, KEYS, 1).npu()
    assert kernel.indexer_loss(*given, mask, 0.5, index_scale=0.5).abs().item() <= KEYS * KEYS * 2**-22


@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "of chosen keys"])
def test_a_step_along_the_gradient_makes_it_smaller(kernel: ModuleType, is_sparse: bool) -> None:
    mask, seen = masks(kernel)["causal"]
    given = [t.npu().requires_grad_() for t in drawn(*shapes(QUERIES, KEYS))]
    options = {"indices": chosen_and_seen(seen, COUNT)[0].npu()} if is_sparse else {}
    losses = []
    for _ in range(5):
        loss = kernel.indexer_loss(*given, mask, SCALE, **options)
        losses.append(loss.item())
        gradients = torch.autograd.grad(loss, given[2:])
        with torch.no_grad():
            for leaf, gradient in zip(given[2:], gradients):
                leaf -= 0.01 * gradient
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]


FUSED = {  # queries, keys, whether the operator takes them, and what differs from DeepSeek-V3.2
    "a prompt": (12, 12, True, {}),
    "behind a cache": (5, 12, True, {}),
    "in parts": (12, 12, True, {}),
    "16 heads": (12, 12, False, {"heads": 16}),
    "five keys": (12, 12, False, {"count": 5}),
    "padded": (12, 12, False, {}),
}


@pytest.mark.parametrize("name", FUSED)
def test_an_operator_computes_it_in_bfloat16(kernel: ModuleType, npu_counters, monkeypatch, name: str) -> None:
    """Gradients are rounded to bfloat16 once, and are sums of few numbers: 2^-7 of the norm."""
    queries, keys, is_taken, differs = FUSED[name]
    heads = differs.get("heads", 32)
    sizes = (BATCH, queries, heads, 576), (BATCH, keys, 1, 576), (BATCH, queries, 8, 128), (BATCH, keys, 128)
    given = [0.3 * t for t in drawn(*sizes, dtype=torch.bfloat16)] + drawn((BATCH, queries, 8))
    if name == "in parts":
        monkeypatch.setattr(importlib.import_module(f"{kernel.__name__}.sparse.indexer_loss"), "MOST_LOSS_QUERIES", 5)
    padding = None
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries).expand(BATCH, 1, -1, -1)
    if name == "padded":
        padding = (torch.arange(keys) >= torch.tensor([[3], [0]])).npu()
        seen = seen & padding.cpu()[:, None, None]
    mask = kernel.attention_mask(
        BATCH, queries, keys, q_offset=keys - queries, attention_mask=padding, device="npu", allow_is_causal_skip=False
    )
    count = differs.get("count", keys)
    indices, both = chosen_and_seen(seen, count)
    compare(kernel, given, mask, both, 2**-7, indices=indices.npu())
    launches = npu_counters().get("npu_sparse_lightning_indexer_grad_kl_loss", 0)
    assert launches == (0 if not is_taken else 3 if name == "in parts" else 1)


def test_autocast_rounds_products_and_nothing_else(kernel: ModuleType) -> None:
    mask, _ = masks(kernel)["causal"]
    given = drawn(*shapes(QUERIES, KEYS))
    results = []
    for is_cast in (True, False):
        leaves = [t.npu().requires_grad_() for t in given]
        with torch.autocast("npu", torch.bfloat16, enabled=is_cast):
            tensors = leaves if is_cast else [*(t.bfloat16() for t in leaves[:4]), leaves[4]]
            loss = kernel.indexer_loss(*tensors, mask, SCALE)
            loss.backward()
        results.append([loss.detach(), *(leaf.grad for leaf in leaves[2:])])
    assert all(map(torch.equal, *results))


def test_what_does_not_fit_is_said(kernel: ModuleType) -> None:
    mask, _ = masks(kernel)["causal"]
    given = [t.npu() for t in drawn(*shapes(QUERIES, KEYS))]
    with pytest.raises(ValueError, match=r"key \[B, S_k, N_k, D\]"):
        kernel.indexer_loss(given[0], given[1][:, :, 0], *given[2:], mask, SCALE)
    with pytest.raises(TypeError, match="mask must be bool"):
        kernel.indexer_loss(*given, masks(kernel)["added"][0], SCALE)
    with pytest.raises(TypeError, match="indices must be integers"):
        kernel.indexer_loss(*given, mask, SCALE, torch.zeros(BATCH, QUERIES, 2).npu())


@pytest.mark.software
@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "of chosen keys"])
def test_the_host_never_waits_and_nothing_is_larger_than_the_budget(kernel, npu_counters, monkeypatch, is_sparse):
    """512 queries and keys, 32 heads, 1 MB: neither scores of all heads nor a mask of all queries and keys."""
    monkeypatch.setattr(importlib.import_module(f"{kernel.__name__}.sparse.sparse_attention"), "BLOCK_BYTES", 2**20)
    sizes = (1, 512, 32, 24), (1, 512, 1, 24), (1, 512, 8, 16), (1, 512, 16), (1, 512, 8)
    given = [t.npu().requires_grad_() for t in drawn(*sizes)]
    indices = torch.arange(16, dtype=torch.int32).expand(1, 512, -1).npu() if is_sparse else None
    mask = kernel.attention_mask(1, 512, 512, device="npu")
    npu_counters()
    with Largest() as largest:
        kernel.indexer_loss(*given, mask, SCALE, indices).backward()
    assert largest.bytes <= 2**21  # the query alone, in float32, has 1.5 MB
    assert npu_counters().get("stream_syncs", 0) == 0
