"""Attention: the implementation ``npu_flash_attention``, and what ``sdpa`` means on the NPU while it is registered."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedModel,
    masking_utils,
    modeling_flash_attention_utils,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kernels_ext_npu.binding import forward_binding, registration
from kernels_ext_npu.binding.devices import device_of, is_elsewhere
from kernels_ext_npu.binding.registration import Registration
from kernels_ext_npu.catalogue import ATTENTION, INDEXERS
from kernels_ext_npu.matching.classification import BIASED, UNNAMED, attends, text_of
from kernels_ext_npu.matching.learned_mask_scan import has_learned_mask
from kernels_ext_npu.swaps import refusals
from kernels_ext_npu.swaps.attention import calls, flash_question, indexers, latents, names, serving
from kernels_ext_npu.swaps.named_implementation import NPU_FLASH_ATTENTION
from kernels_ext_npu.swaps.protocol import Row, Swapping
from kernels_ext_npu.transformers_internals import sdpa_drops_biases

LEARNED_BIAS = "it adds a learned bias to scores, which transformers' sdpa drops on NPUs"
# accelerate 1.15.0: what refuses windows for torch's context parallelism, and takes masks away from attention
_DROPS_MASKS = "_attach_context_parallel_hooks"
# of classes, with what says what is called in place of one
_METHODS = {"expand_kv": latents.in_place_of, "forward": indexers.in_place_of}


def install(registration: Registration) -> None:
    """Enter ours into transformers' tables, and into the place of its own, unless somebody has replaced that."""
    if not NPU_FLASH_ATTENTION.is_registered():
        return
    patches, is_registered = registration.patches, NPU_FLASH_ATTENTION.is_registered
    sdpa_drops_biases()  # asked before others replace functions of torch, as its context parallelism does
    table, mask_table = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    for name in NPU_FLASH_ATTENTION.names:
        patches.item(table, name, calls.npu_flash_attention)
        patches.item(mask_table, name, calls.npu_flash_attention_mask)
    if table["sdpa"] is sdpa_attention_forward and mask_table["sdpa"] is sdpa_mask:
        before = ALL_ATTENTION_FUNCTIONS["sdpa"]  # which may lie over the table, and calls transformers' own
        ours = functools.partial(calls.stand_in, sdpa_attention_forward)
        patches.item(table, "sdpa", functools.update_wrapper(ours, sdpa_attention_forward))
        patches.item(mask_table, "sdpa", calls.mask_standing_in(sdpa_mask, before))
    if mask_table["eager"] is eager_mask:
        patches.item(mask_table, "eager", calls.mask_standing_in(eager_mask))
    patches.method(AttentionInterface, "get_interface", calls.get_interface, is_registered)
    patches.method(PreTrainedModel, "_check_and_adjust_attn_implementation", names.check_and_adjust, is_registered)
    patches.method(PreTrainedModel, "set_attn_implementation", names.set_implementation, is_registered)
    patches.method(PreTrainedModel, "__init__", _make, is_registered)
    patches.method(PreTrainedModel, "__call__", calls.call_model, calls.reads_no_positions)
    patches.method(masking_utils, "_preprocess_mask_arguments", calls.preprocess, calls.reads_no_positions)
    patches.method(modeling_flash_attention_utils, "lazy_import_flash_attention", names.answer_import, is_registered)
    accelerator = sys.modules.get("accelerate.accelerator")  # transformers imports it where it is installed
    if accelerator is not None and hasattr(accelerator, _DROPS_MASKS):
        patches.method(accelerator, _DROPS_MASKS, calls.attach_context_parallel_hooks, is_registered)
    flash_question.answer_files([name for name in sys.modules if name.startswith(flash_question.FILES)], patches)


def apply(model: nn.Module, swapping: Swapping) -> None:
    """Let the kernel, which is loaded now, compute the attention of a model, but of parts that were restored."""
    for module in swapping.modules:
        if serving.PLAIN in vars(module) and module not in registration.restored:
            delattr(module, serving.PLAIN)
        if isinstance(module, PreTrainedModel) and module not in registration.restored:
            serving.forget_restored(module.config)
    if NPU_FLASH_ATTENTION.is_registered():
        patches = swapping.registration.patches
        for cls in {base for each in swapping.by_class for base in each.__mro__}:
            for name, in_place_of in _METHODS.items():
                ours = in_place_of(cls, vars(cls)[name]) if name in vars(cls) else None
                if ours is not None and not patches.knows(cls, name):
                    patches.method(cls, name, ours, NPU_FLASH_ATTENTION.is_registered)
        registration.try_package(NPU_FLASH_ATTENTION.repository)


def revert(model: nn.Module) -> None:
    """Let a model compute its attention without the kernel, and name what it named before."""
    names.take_out(model)
    for module in model.modules():
        if serving.calls_by_name(module) or indexers.is_indexer(module):
            setattr(module, serving.PLAIN, True)
        if isinstance(module, PreTrainedModel):
            serving.note_restored(module.config)


def rows(model: nn.Module) -> Iterator[Row]:
    """Describe every module of a model that computes attention, or chooses keys for it."""
    for path, module in model.named_modules():
        name, kernel = type(module).__name__, NPU_FLASH_ATTENTION.name
        if indexers.is_indexer(module):
            reason = _refusal(module)
            yield Row(path, name, kernel, reason is None, reason, is_candidate=False, kind=INDEXERS.in_models)
        if not attends(type(module)):
            continue
        if (reason := _refusal(module)) is not None:
            served = kernel if serving.class_refusal(type(module)) is None else None
            yield Row(path, name, served, False, reason, is_candidate=False, kind=ATTENTION.in_models)
        else:
            stranger = forward_binding.stranger(module)
            remark = _remark(model, path) if stranger is None else refusals.bypassed_by(stranger)
            yield Row(path, name, kernel, True, remark, kind=ATTENTION.in_models)


def _make(original: Any, self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
    """Make a model, whose files may ask by then, with a kernel that is loaded, if that takes no network."""
    assert registration.current is not None
    flash_question.answer_files({cls.__module__ for cls in type(self).__mro__}, registration.current.patches)
    original(self, *args, **kwargs)
    if registration.current.source != "hub":
        registration.try_package(NPU_FLASH_ATTENTION.repository)


def _refusal(module: nn.Module) -> str | None:
    """Return why the kernel does not compute the attention of a module; None where it does."""
    if not NPU_FLASH_ATTENTION.is_registered():
        return refusals.left_out(NPU_FLASH_ATTENTION.repository) or refusals.NOT_REGISTERED
    if indexers.is_indexer(module):
        return indexers.refusal(module)
    if not serving.calls_by_name(module):
        return UNNAMED
    if NPU_FLASH_ATTENTION.is_named_by(module.config):
        return None
    if not serving.stands_for(module.config):  # type: ignore[arg-type]
        return f"the attention implementation {module.config._attn_implementation} was asked for"  # type: ignore
    if (reason := serving.refusal(module, device_of(module), *_dtype_and_softcap(module))) is not None:
        return refusals.elsewhere(module) if reason is serving.ELSEWHERE else reason
    stranger = serving.stranger(module.config)  # type: ignore[arg-type]
    return stranger and f"another library has replaced the attention implementation sdpa: {stranger}"


def _remark(model: nn.Module, path: str) -> str | None:
    """Return why the kernel computes it in torch, with all scores in memory, or unlike what stands for it otherwise."""
    module = model.get_submodule(path)
    if is_elsewhere(module):
        return f"in torch, since it is on {device_of(module)}"
    limit = serving.limit(module, *_dtype_and_softcap(module))
    if limit in (serving.IN_FLOAT64, serving.CAPPED, BIASED):
        return f"in torch, {'where' if limit is BIASED else 'since'} {text_of(limit)}"
    drops_biases = sdpa_drops_biases() and not serving.is_eager_by_default(type(module.config))
    return LEARNED_BIAS if drops_biases and has_learned_mask(model, path) else None


def _dtype_and_softcap(module: nn.Module) -> tuple[torch.dtype, Any]:
    is_in_float64 = any(parameter.dtype == torch.float64 for parameter in module.parameters())
    dtype = torch.float64 if is_in_float64 else torch.float32
    return dtype, getattr(module, "attn_logit_softcapping", None)
