"""Whether sequences are packed in a batch: transformers reads it from the device for every mask of a forward.

Positions that nobody gave, which a model counts itself, are those of one sequence: they are not looked at. Others are
handed on as they are, and the kernel reads them once a forward.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kernels_ext_npu.swapping.attention.serving import describes_masks
from kernels_ext_npu.swapping.named_implementation import NPU_FLASH_ATTENTION

_counts_itself: ContextVar[bool] = ContextVar("_counts_itself", default=False)


def are_left_alone() -> bool:
    """Tell whether positions are not looked at; a graph cannot look at them anyway."""
    return not torch.compiler.is_compiling() and NPU_FLASH_ATTENTION.is_registered()


def call(original: Callable, self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """Call a model, in place of its ``__call__``, and note whether it counts positions itself.

    The innermost model makes the masks. One that somebody else has written may make the positions of packed sequences.
    """
    forward = inspect.unwrap(self.forward)
    is_known = getattr(forward, "__module__", "").startswith("transformers.")
    # tokens can be given without their name, and what follows them could be positions
    token = _counts_itself.set(is_known and len(args) <= 1 and kwargs.get("position_ids") is None)
    try:
        return original(self, *args, **kwargs)
    finally:
        _counts_itself.reset(token)


def preparing(original: Callable) -> Callable:
    """Return what stands in for ``_preprocess_mask_arguments`` of masking_utils."""

    @functools.wraps(original)
    def prepare(config: Any, embeds: Tensor, mask: Any, cache: Any, positions: Tensor | None, *args: Any) -> tuple:
        is_here = embeds.device.type == "npu"
        is_described = NPU_FLASH_ATTENTION.is_named_by(config) or (is_here and describes_masks(config))
        if not is_described or not are_left_alone():
            return original(config, embeds, mask, cache, positions, *args)
        is_done, mask, _, *sizes = original(config, embeds, mask, cache, None, *args)
        is_given = positions is not None and not _counts_itself.get()
        packed = _sequences(positions.expand(len(embeds), -1)) if is_given and mask is None and cache is None else None
        return is_done, mask, packed, *sizes

    return prepare


def _sequences(positions: Tensor) -> Tensor:
    """Return which sequence each token belongs to, ``[B, S]``: a new one begins where positions do not count on.

    transformers 5.22.2, masking_utils.py, ``find_packed_sequence_indices``.
    """
    return (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
