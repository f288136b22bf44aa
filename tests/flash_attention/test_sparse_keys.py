"""Keys that an indexer chooses, and attention to them, against float64: by operators and in torch, in parts."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import masking_utils

from tests.support.memory import Largest

BATCH, QUERIES, KEYS, COUNT = 2, 9, 13, 5
SEEN = torch.ones(QUERIES, KEYS, dtype=torch.bool).tril(KEYS - QUERIES).expand(BATCH, 1, -1, -1)
PADDING = torch.ones(BATCH, KEYS, dtype=torch.bool)
PADDING[0, :6] = False  # its first two queries see no key


@pytest.fixture(params=[2**28, 1], ids=["at once", "one query after the other"])
def parts(request, kernel: ModuleType, monkeypatch) -> int:
    monkeypatch.setattr(
        importlib.import_module(f"{kernel.__name__}.sparse.sparse_attention"), "BLOCK_BYTES", request.param
    )
    return request.param


def masks(kernel: ModuleType) -> dict[str, tuple[Any, Tensor]]:
    """Masks as the functions take them, and what queries see."""
    sizes = {"batch_size": BATCH, "q_length": QUERIES, "kv_length": KEYS, "q_offset": KEYS - QUERIES}
    described = kernel.attention_mask(**sizes, device="npu")
    padded = kernel.attention_mask(**sizes, attention_mask=PADDING.npu(), device="npu")
    ids = torch.tensor([[0] * 7 + [1] * 6, [0] * 13])
    both = masking_utils.and_masks(
        masking_utils.causal_mask_function, masking_utils.packed_sequence_mask_function(ids.npu())
    )
    packed = kernel.attention_mask(**sizes, mask_function=both, device="npu")
    together = (ids[:, KEYS - QUERIES :, None] == ids[:, None]).unsqueeze(1)
    floating = torch.zeros(SEEN.shape).masked_fill(~SEEN, -torch.inf)
    return {
        "causal": (described, SEEN),
        "padded": (padded, SEEN & PADDING[:, None, None]),
        "packed": (packed, SEEN & together),
        "bool": (SEEN.npu(), SEEN),
        "of three dimensions": (SEEN[:, 0].npu(), SEEN),
        "added": (floating.npu(), SEEN),
    }


MASKS = ["causal", "padded", "packed", "bool", "of three dimensions", "added"]


def drawn(*sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def index_scores(q: Tensor, k: Tensor, w: Tensor, scale: float) -> Tensor:
    products = torch.einsum("bqhd,bkd->bqhk", q.double(), k.double()) * scale
    return torch.einsum("bqh,bqhk->bqk", w.double(), products.relu())


def assert_chosen(found: Tensor, scores: Tensor, seen: Tensor, count: int) -> None:
    """Among the keys that a query sees are those with the highest scores; there are as many as there can be."""
    found = found.cpu()
    assert found.dtype == torch.int32
    assert found.shape == (*scores.shape[:2], count)
    scores = scores.masked_fill(~seen[:, 0], -torch.inf)
    wanted = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(count).indices, True) & seen[:, 0]
    got = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, found.long(), True) & seen[:, 0]
    assert torch.equal(got, wanted)
    chosen_and_seen = seen[:, 0].expand(scores.shape).gather(-1, found.long())
    assert torch.equal(chosen_and_seen.sum(-1), got.sum(-1))  # none of them twice


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("size", "dtype"), [(8, torch.float32), (128, torch.bfloat16)], ids=str)
def test_keys_with_the_highest_scores_are_chosen(
    kernel: ModuleType, parts, npu_counters, size: int, dtype: torch.dtype, name: str
) -> None:
    """In torch, or by an operator."""
    mask, seen = masks(kernel)[name]
    q, k, w = drawn((BATCH, QUERIES, 16, size), (BATCH, KEYS, size), (BATCH, QUERIES, 16), dtype=dtype)
    found = kernel.top_k_keys(*(t.npu() for t in (q, k, w.float())), mask, COUNT, 0.3)
    assert_chosen(found, index_scores(q, k, w, 0.3), seen, COUNT)
    assert ("npu_lightning_indexer" in npu_counters()) == (size == 128 and name == "causal")


PROMPTS = {
    "nothing is padding": torch.ones(BATCH, KEYS, dtype=torch.bool),
    "padding before": PADDING,
    "padding behind": PADDING.flip(-1),
    "more padding behind": torch.arange(KEYS) < torch.tensor([[KEYS], [3]]),
    "a gap": PADDING.roll(3, -1),
    "padding on both sides": torch.stack((PADDING[0], PADDING[0].flip(-1))),
    "one has a token alone": torch.arange(KEYS) >= torch.tensor([[KEYS - 1], [0]]),
}


@pytest.mark.parametrize("count", [COUNT, 10])
@pytest.mark.parametrize("name", PROMPTS)
def test_an_operator_chooses_among_the_tokens_of_a_prompt(kernel: ModuleType, npu_counters, name: str, count: int):
    """Where padding stands before them all or behind them all; else in torch."""
    mask = kernel.attention_mask(BATCH, KEYS, KEYS, attention_mask=PROMPTS[name].npu(), device="npu")
    seen = torch.ones(KEYS, KEYS, dtype=torch.bool).tril() & PROMPTS[name][:, None, None]
    q, k, w = drawn((BATCH, KEYS, 16, 128), (BATCH, KEYS, 128), (BATCH, KEYS, 16), dtype=torch.bfloat16)
    found = [kernel.top_k_keys(*(t.npu() for t in (q, k, w.float())), mask, count, 0.3) for _ in range(2)]
    for each in found:
        assert_chosen(each, index_scores(q, k, w, 0.3), seen, count)
    launched = 4 if "padding behind" in name else 0 if name in ("a gap", "padding on both sides") else 2
    assert npu_counters().get("npu_lightning_indexer", 0) == launched
    assert npu_counters()["stream_syncs"] == 1 + 2  # of padding, and of both results


def test_parts_of_a_prompt_are_as_free_of_padding_as_the_whole(kernel: ModuleType, npu_counters) -> None:
    kept = torch.ones(BATCH, KEYS, dtype=torch.bool, device="npu")
    mask = kernel.attention_mask(BATCH, KEYS, KEYS, attention_mask=kept, device="npu").slice_queries(4, 11)
    q, k, w = drawn((BATCH, 7, 16, 128), (BATCH, 11, 128), (BATCH, 7, 16), dtype=torch.bfloat16)
    found = kernel.top_k_keys(*(t.npu() for t in (q, k, w.float())), mask, COUNT)
    seen = torch.ones(BATCH, 1, 7, 11, dtype=torch.bool).tril(4)
    assert_chosen(found, index_scores(q, k, w, 1.0), seen, COUNT)
    assert npu_counters()["npu_lightning_indexer"] == 1


def test_a_graph_of_a_padded_prompt_reads_nothing(kernel: ModuleType) -> None:
    mask = kernel.attention_mask(BATCH, KEYS, KEYS, attention_mask=PADDING.npu(), device="npu")
    seen = torch.ones(KEYS, KEYS, dtype=torch.bool).tril() & PADDING[:, None, None]
    q, k, w = drawn((BATCH, KEYS, 16, 128), (BATCH, KEYS, 128), (BATCH, KEYS, 16), dtype=torch.bfloat16)
    given, graph = [t.npu() for t in (q, k, w.float())], torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        found = kernel.top_k_keys(*given, mask, COUNT)
    graph.replay()
    assert_chosen(found, index_scores(q, k, w, 1.0), seen, COUNT)


def test_an_operator_chooses_within_packed_sequences(kernel: ModuleType, npu_counters) -> None:
    ids = torch.tensor([[0] * 3 + [1] * 10, [0] * 12 + [1]])
    both = masking_utils.and_masks(
        masking_utils.causal_mask_function, masking_utils.packed_sequence_mask_function(ids.npu())
    )
    mask = kernel.attention_mask(BATCH, KEYS, KEYS, mask_function=both, device="npu")
    seen = (torch.ones(KEYS, KEYS, dtype=torch.bool).tril() & (ids[:, :, None] == ids[:, None])).unsqueeze(1)
    q, k, w = drawn((BATCH, KEYS, 16, 128), (BATCH, KEYS, 128), (BATCH, KEYS, 16), dtype=torch.bfloat16)
    found = kernel.top_k_keys(*(t.npu() for t in (q, k, w.float())), mask, COUNT)
    assert_chosen(found, index_scores(q, k, w, 1.0), seen, COUNT)
    assert npu_counters()["npu_lightning_indexer"] == 1


def test_autocast_rounds_what_it_is_given_and_nothing_else(kernel: ModuleType, npu_counters) -> None:
    mask, seen = masks(kernel)["causal"]
    q, k, w = drawn((BATCH, QUERIES, 16, 128), (BATCH, KEYS, 128), (BATCH, QUERIES, 16))
    with torch.autocast("npu", torch.bfloat16):
        found = kernel.top_k_keys(*(t.npu() for t in (q, k, w)), mask, COUNT)
    assert_chosen(found, index_scores(q.bfloat16(), k.bfloat16(), w, 1.0), seen, COUNT)
    assert npu_counters()["npu_lightning_indexer"] == 1
    given = drawn((BATCH, QUERIES, 3, 24), (BATCH, KEYS, 16), (BATCH, KEYS, 8), (3,))
    indices = torch.arange(COUNT).int().expand(BATCH, QUERIES, -1).npu()
    results = []
    for is_cast in (True, False):
        leaves = [t.npu().requires_grad_() for t in given]
        with torch.autocast("npu", torch.bfloat16, enabled=is_cast):
            tensors = leaves[:3] if is_cast else [t.bfloat16() for t in leaves[:3]]
            out = kernel.attend_chosen(*tensors, indices, mask, 0.2, leaves[3])
            (out * torch.arange(16, device="npu")).sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    assert [t.dtype for t in results[0]] == [torch.bfloat16] + 4 * [torch.float32]
    assert all(map(torch.equal, *results))


def test_where_more_keys_are_wanted_than_there_are_all_are_chosen(kernel: ModuleType) -> None:
    tensors = [t.npu() for t in drawn((1, 7, 16, 128), (1, 7, 128), (1, 7, 16), dtype=torch.bfloat16)]
    found = kernel.top_k_keys(*tensors, kernel.attention_mask(1, 7, 7, device="npu"), 8)
    assert found[0, 3].tolist() == list(range(7))


def attended(
    q: Tensor, latents: Tensor, rope: Tensor, indices: Tensor, seen: Tensor, scale: float, sink: Tensor | None
) -> Tensor:
    """Compute ``[B, S, N, R]`` in the dtype of what is given; a query that sees no key gives zero."""
    chosen = torch.zeros(*indices.shape[:2], latents.shape[1], dtype=torch.bool).scatter(-1, indices.long(), True)
    left_out = ~(chosen.unsqueeze(1) & seen)
    scores = torch.einsum("bqnd,bkd->bnqk", q, torch.cat((latents, rope), -1)) * scale
    scores = scores.masked_fill(left_out, -1e9)
    if sink is not None:
        scores = torch.cat((scores, sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    weights = scores.softmax(-1)[..., : latents.shape[1]].masked_fill(left_out, 0)
    return torch.einsum("bnqk,bkr->bqnr", weights, latents)


@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("name", MASKS)
def test_attention_to_chosen_keys_and_its_gradients(kernel: ModuleType, parts, name: str, sink: bool) -> None:
    """In float32, sums of at most 24 numbers and of 5: 2^-20 of the largest."""
    mask, seen = masks(kernel)[name]
    given = drawn((BATCH, QUERIES, 3, 24), (BATCH, KEYS, 16), (BATCH, KEYS, 8), *([(3,)] if sink else []))
    indices = torch.rand(BATCH, QUERIES, KEYS, generator=torch.Generator().manual_seed(1))
    indices = indices.masked_fill(~seen[:, 0], -1).topk(COUNT).indices.int()
    leaves, exact = [t.npu().requires_grad_() for t in given], [t.double().requires_grad_() for t in given]
    out = kernel.attend_chosen(*leaves[:3], indices.npu(), mask, 0.2, *leaves[3:])
    wanted = attended(*exact[:3], indices, seen, 0.2, exact[3] if sink else None)
    assert (out.detach().cpu() - wanted.detach()).abs().max() <= 2**-20 * wanted.detach().abs().max()
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2))
    (out * weights.npu()).sum().backward()
    (wanted * weights.double()).sum().backward()
    for leaf, truth in zip(leaves, exact):
        assert (leaf.grad.cpu() - truth.grad).abs().max() <= 2**-19 * truth.grad.abs().max()
    with torch.no_grad():
        assert torch.equal(kernel.attend_chosen(*leaves[:3], indices.npu(), mask, 0.2, *leaves[3:]), out.detach())


@pytest.mark.parametrize("name", MASKS)
def test_an_operator_attends_to_the_same_keys(kernel: ModuleType, npu_counters, name: str) -> None:
    """In bfloat16; the operator rounds weights once more than the result."""
    mask, seen = masks(kernel)[name]
    sizes = (BATCH, QUERIES, 4, 576), (BATCH, KEYS, 512), (BATCH, KEYS, 64)
    given = drawn(*sizes, dtype=torch.bfloat16)
    indices = torch.rand(BATCH, QUERIES, KEYS, generator=torch.Generator().manual_seed(1))
    indices = indices.masked_fill(~seen[:, 0], -1).topk(COUNT).indices.int()
    out = kernel.attend_chosen(*(t.npu() for t in given), indices.npu(), mask, 0.04)
    wanted = attended(*(t.double() for t in given), indices, seen, 0.04, None)
    assert ("npu_sparse_flash_attention" in npu_counters()) == (name != "added")
    assert (out.cpu().double() - wanted).norm() <= 2**-7 * wanted.norm()
    assert (out.cpu()[wanted == 0] == 0).all()


@pytest.mark.software
def test_no_tensor_is_larger_than_the_budget(kernel: ModuleType, monkeypatch) -> None:
    """Neither scores of all heads nor a mask of all queries and keys: 512 queries and keys, 32 heads, 1 MB."""
    monkeypatch.setattr(importlib.import_module(f"{kernel.__name__}.sparse.sparse_attention"), "BLOCK_BYTES", 2**20)
    q, k, w = (t.npu() for t in drawn((1, 512, 32, 16), (1, 512, 16), (1, 512, 32)))
    mask = kernel.attention_mask(1, 512, 512, device="npu")
    many, latents, rope = (t.npu() for t in drawn((1, 512, 4, 24), (1, 512, 16), (1, 512, 8)))
    with Largest() as largest:
        indices = kernel.top_k_keys(q, k, w, mask, 16)
        kernel.attend_chosen(many, latents, rope, indices, mask, 0.2)
    assert largest.bytes <= 2**20
