"""Whether sequences are packed in a batch: transformers reads it from the device for every mask of a forward.

Positions that nobody gave, which a model counts itself, are those of one sequence: they are not looked at. Others are
handed on as they are, and the kernel reads them once a forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, masking_utils

from kernels_ext_npu.swapping import state
from kernels_ext_npu.swapping.attention_classes import describes
from kernels_ext_npu.swapping.attention_names import REPOSITORY, names_it
from kernels_ext_npu.swapping.patches import Patches

_counts_itself: ContextVar[bool] = ContextVar("_counts_itself", default=False)


def install(patches: Patches) -> None:
    """Note what each model is given, and let masks of ours be made without reading positions."""
    patches.method(PreTrainedModel, "__call__", _noting_positions, _is_noting)
    original = masking_utils._preprocess_mask_arguments

    def preprocess(config: Any, inputs_embeds: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not _is_noting() or not _are_ours(config, inputs_embeds):
            return original(config, inputs_embeds, *args, **kwargs)
        return _without_reading(original, config, inputs_embeds, *args, **kwargs)

    patches.attribute(masking_utils, "_preprocess_mask_arguments", preprocess)


def _is_noting() -> bool:
    return not torch.compiler.is_compiling() and state.uses(REPOSITORY)


def _are_ours(config: Any, inputs_embeds: Tensor) -> bool:
    is_here = inputs_embeds.device.type == "npu"
    return names_it(config) or (is_here and describes(type(config), config._attn_implementation))


def _noting_positions(original: Callable, self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """Call a model: the innermost one makes the masks. One that somebody else has written may make packed positions."""
    forward = inspect.unwrap(self.forward)
    is_known = getattr(forward, "__module__", "").startswith("transformers.")
    # tokens can be given without their name, and what follows them could be positions
    token = _counts_itself.set(is_known and len(args) <= 1 and kwargs.get("position_ids") is None)
    try:
        return original(self, *args, **kwargs)
    finally:
        _counts_itself.reset(token)


def _without_reading(
    original: Callable,
    config: Any,
    inputs_embeds: Tensor,
    attention_mask: Any,
    past_key_values: Any,
    position_ids: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> tuple:
    """Prepare what a mask is made of, as transformers does, but for the question whether sequences are packed."""
    is_done, mask, _, *sizes = original(config, inputs_embeds, attention_mask, past_key_values, None, *args, **kwargs)
    packed = None
    if position_ids is not None and mask is None and past_key_values is None and not _counts_itself.get():
        packed = _sequences(position_ids.expand(len(inputs_embeds), -1))
    return is_done, mask, packed, *sizes


def _sequences(positions: Tensor) -> Tensor:
    """Return which sequence each token belongs to, ``[B, S]``: a new one begins where positions do not count on.

    transformers 5.22.2, masking_utils.py, ``find_packed_sequence_indices``.
    """
    return (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
