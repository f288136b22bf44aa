"""Attention: the implementation ``npu_flash_attention``, and what ``sdpa`` means on the NPU while it is registered."""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from kernels_ext_npu.binding import registration
from kernels_ext_npu.binding.registration import Registration
from kernels_ext_npu.swaps.attention import calls, flash_question, names, serving
from kernels_ext_npu.swaps.named_implementation import NPU_FLASH_ATTENTION
from kernels_ext_npu.swaps.protocol import Swapping


def install(registration: Registration) -> None:
    """Enter ours into transformers' tables, and into the place of its own, unless somebody has replaced that."""
    if not NPU_FLASH_ATTENTION.is_registered():
        return
    patches, is_registered = registration.patches, NPU_FLASH_ATTENTION.is_registered
    table, mask_table = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    patches.item(table, NPU_FLASH_ATTENTION.name, calls.npu_flash_attention)
    patches.item(mask_table, NPU_FLASH_ATTENTION.name, calls.npu_flash_attention_mask)
    if table["sdpa"] is sdpa_attention_forward and mask_table["sdpa"] is sdpa_mask:
        ours = functools.partial(calls.stand_in, sdpa_attention_forward)
        patches.item(table, "sdpa", functools.update_wrapper(ours, sdpa_attention_forward))
        patches.item(mask_table, "sdpa", calls.mask_standing_in(sdpa_mask))
    if mask_table["eager"] is eager_mask:
        patches.item(mask_table, "eager", calls.mask_standing_in(eager_mask))
    patches.method(AttentionInterface, "get_interface", calls.get_interface, is_registered)
    patches.method(PreTrainedModel, "_check_and_adjust_attn_implementation", names.check_and_adjust, is_registered)
    patches.method(PreTrainedModel, "set_attn_implementation", names.set_implementation, is_registered)
    patches.method(PreTrainedModel, "__init__", _make, is_registered)
    patches.method(PreTrainedModel, "__call__", calls.call_model, calls.reads_no_positions)
    preprocess = calls.preprocess_standing_in(masking_utils._preprocess_mask_arguments)
    patches.attribute(masking_utils, "_preprocess_mask_arguments", preprocess)
    flash_question.answer_files([name for name in sys.modules if name.startswith(flash_question.FILES)], patches)


def apply(model: nn.Module, swapping: Swapping) -> None:
    """Let the kernel, which is loaded now, compute the attention of a model, but of parts that were restored."""
    for module in model.modules():
        if serving.PLAIN in vars(module) and module not in registration.restored:
            delattr(module, serving.PLAIN)
    if NPU_FLASH_ATTENTION.is_registered():
        registration.try_package(NPU_FLASH_ATTENTION.repository)


def revert(model: nn.Module) -> None:
    """Let a model compute its attention without the kernel, and name what it named before."""
    names.take_out(model)
    for module in filter(serving.calls_by_name, model.modules()):
        setattr(module, serving.PLAIN, True)


def _make(original: Any, self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
    """Make a model, whose files may ask by then, with a kernel that is loaded, if that takes no network."""
    assert registration.current is not None
    flash_question.answer_files({cls.__module__ for cls in type(self).__mro__}, registration.current.patches)
    original(self, *args, **kwargs)
    if registration.current.source != "hub":
        registration.try_package(NPU_FLASH_ATTENTION.repository)
