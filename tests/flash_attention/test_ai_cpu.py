"""What is computed of integers and masks stays on the vector cores."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from transformers import masking_utils

from tests.flash_attention.ai_cpu import OnAiCpu
from tests.flash_attention.test_sparse_keys import BATCH, COUNT, KEYS, PADDING, QUERIES, drawn, masks


def keys_of_one_query(kernel: ModuleType) -> None:
    q, k, w = drawn((BATCH, 1, 16, 128), (BATCH, KEYS, 128), (BATCH, 1, 16), dtype=torch.bfloat16)
    mask = kernel.attention_mask(BATCH, 1, KEYS, KEYS - 1, attention_mask=PADDING.npu(), device="npu")
    kernel.top_k_keys(q.npu(), k.npu(), w.float().npu(), mask, COUNT)


def keys_of_a_padded_prompt(kernel: ModuleType) -> None:
    q, k, w = drawn((BATCH, KEYS, 16, 128), (BATCH, KEYS, 128), (BATCH, KEYS, 16), dtype=torch.bfloat16)
    mask = kernel.attention_mask(BATCH, KEYS, KEYS, attention_mask=PADDING.npu(), device="npu")
    kernel.top_k_keys(q.npu(), k.npu(), w.float().npu(), mask, COUNT)


def attention_to_chosen_keys(kernel: ModuleType, name: str, size: int) -> None:
    q, latents, rope = drawn(
        (BATCH, QUERIES, 4, size + 64), (BATCH, KEYS, size), (BATCH, KEYS, 64), dtype=torch.bfloat16
    )
    indices = torch.arange(COUNT, dtype=torch.int32).expand(BATCH, QUERIES, -1).npu()
    kernel.attend_chosen(q.npu(), latents.npu(), rope.npu(), indices, masks(kernel)[name][0], 0.1)


def packed_chunks(kernel: ModuleType) -> None:
    ids = torch.tensor([[0] * 5 + [1] * 4, [0] * 9]).npu()
    chunks = masking_utils.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.long, device="npu"))
    function = masking_utils.and_masks(chunks, masking_utils.packed_sequence_mask_function(ids))
    kernel.attention_mask(2, 9, 9, mask_function=function, device="npu").band_or_varlen(2)


CALLS: dict[str, Callable[[ModuleType], None]] = {
    "keys of one query": keys_of_one_query,
    "keys of a padded prompt": keys_of_a_padded_prompt,
    "chosen keys, by an operator": lambda kernel: attention_to_chosen_keys(kernel, "padded", 512),
    "chosen keys, in torch": lambda kernel: attention_to_chosen_keys(kernel, "padded", 16),
    "chosen keys, with a mask that is added": lambda kernel: attention_to_chosen_keys(kernel, "added", 512),
    "packed chunks": packed_chunks,
}


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_computed_on_an_ai_cpu(kernel: ModuleType, name: str) -> None:
    with OnAiCpu() as computed:
        CALLS[name](kernel)
    assert computed.found == []


def test_what_is_computed_there_is_seen() -> None:
    numbers = torch.arange(6, device="npu").view(2, 3)
    with OnAiCpu() as computed:
        numbers.cumsum(-1)
        (numbers > 1).gather(-1, numbers % 3)
        numbers // 2
        numbers.int().cumsum(-1, dtype=torch.int32)
    assert computed.found == ["cumsum of torch.int64", "gather of torch.bool", "floor_divide of torch.int64"]
