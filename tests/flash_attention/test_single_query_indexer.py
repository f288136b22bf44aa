"""Keys that an indexer chooses for one query a row, as in a step of decoding, against float64: in place, and copied."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from tests.flash_attention.test_sparse_keys import (
    BATCH,
    COUNT,
    KEYS,
    PADDING,
    PROMPTS,
    assert_chosen,
    drawn,
    index_scores,
)

TOGETHER = {
    "all": torch.ones(BATCH, KEYS, dtype=torch.bool),
    "those in the middle": torch.arange(KEYS) // 4 == torch.tensor([[1], [2]]),
    "one with a gap": PROMPTS["a gap"],
    "none": torch.zeros(BATCH, KEYS, dtype=torch.bool),
}
ONE_QUERY = ["padded", "in a static cache", "bool", "of three dimensions", "added", "sees none", *TOGETHER]


@pytest.mark.parametrize("name", ONE_QUERY)
def test_an_operator_chooses_for_one_query_among_any_keys(kernel: ModuleType, npu_counters, name: str) -> None:
    """The host waits for nothing but the result."""
    seen = torch.rand(BATCH, 1, 1, KEYS, generator=torch.Generator().manual_seed(3)) < 0.6
    if name == "padded":
        mask = kernel.attention_mask(BATCH, 1, KEYS, KEYS - 1, attention_mask=seen[:, 0, 0].npu(), device="npu")
    elif name == "in a static cache":
        offset = torch.tensor(8).npu()
        mask = kernel.attention_mask(BATCH, 1, KEYS, offset, attention_mask=seen[:, 0, 0, :9].npu(), device="npu")
        seen[..., 9:] = False
    elif name in TOGETHER:
        seen = TOGETHER[name][:, None, None]
        mask = kernel.attention_mask(BATCH, 1, KEYS, KEYS - 1, attention_mask=TOGETHER[name].npu(), device="npu")
    else:
        seen &= torch.tensor([name != "sees none", True]).view(-1, 1, 1, 1)
        floating = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
        mask = {"of three dimensions": seen[:, 0], "added": floating}.get(name, seen).npu()
    q, k, w = drawn((BATCH, 1, 16, 128), (BATCH, KEYS, 128), (BATCH, 1, 16), dtype=torch.bfloat16)
    k, w = torch.where(seen.view(BATCH, KEYS, 1), k, 8 * k), w.abs()  # what it does not see has the highest scores
    given = [t.npu() for t in (q, k, w.float())]
    before = npu_counters().get("stream_syncs", 0)
    found = kernel.top_k_keys(*given, mask, COUNT)
    assert npu_counters().get("stream_syncs", 0) == before
    assert_chosen(found, index_scores(q, k, w, 1.0), seen, COUNT)
    assert ("npu_lightning_indexer" in npu_counters()) == (name != "added")


def test_layers_look_once_where_the_keys_are(kernel: ModuleType, npu_counters) -> None:
    mask = kernel.attention_mask(BATCH, 1, KEYS, KEYS - 1, attention_mask=PADDING.npu(), device="npu")
    q, k, w = drawn((BATCH, 1, 16, 128), (BATCH, KEYS, 128), (BATCH, 1, 16), dtype=torch.bfloat16)
    given = [t.npu() for t in (q, k, w.float())]
    for _ in range(3):
        kernel.top_k_keys(*given, mask, COUNT)
    assert npu_counters()["sort"] == 1
    assert npu_counters()["npu_moe_init_routing_v2"] == 3
    mask[0, 0, 0, :] = torch.arange(KEYS).npu() < 6  # somebody writes into it
    found = kernel.top_k_keys(*given, mask, COUNT)
    seen = PADDING.clone()[:, None, None]
    seen[0] = torch.arange(KEYS) < 6
    assert_chosen(found, index_scores(q, k, w, 1.0), seen, COUNT)
