"""Masks of modules that the kernel does not serve, while torch exchanges keys: it knows the order of tokens alone."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_overlay,
    packed_sequence_mask_function,
    sliding_window_overlay,
)

import kernels_ext_npu
from kernels_ext_npu.context_parallel import guards

WINDOW = and_masks(sliding_window_overlay(4), causal_mask_function)
CHUNKS = and_masks(chunked_overlay(4, torch.zeros(1, dtype=torch.int)), causal_mask_function)
PACKED = and_masks(causal_mask_function, packed_sequence_mask_function(torch.arange(8).unsqueeze(0) // 4))


def described(function: Callable) -> object:
    return kernels_ext_npu.load("FlashAttention").attention_mask(1, 8, 8, mask_function=function)


def test_context_parallelism_refuses_masks_that_are_more_than_causal() -> None:
    module = nn.Linear(1, 1)
    for served in (None, described(causal_mask_function), described(bidirectional_mask_function)):
        guards.refuse_mask(module, served)
    for mask in (*map(described, (WINDOW, CHUNKS, PACKED)), torch.ones(1, 1, 8, 8, dtype=torch.bool)):
        with pytest.raises(ValueError, match="Linear: torch's context_parallel exchanges keys, and computes causal"):
            guards.refuse_mask(module, mask)
