"""Attention: the implementation ``npu_flash_attention``, which also computes ``sdpa`` on the NPU while registered."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, flex_attention_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kernels_ext_npu import flex_attention
from kernels_ext_npu.binding import forward_binding, registration
from kernels_ext_npu.binding.devices import compute_device, is_elsewhere
from kernels_ext_npu.binding.named_implementation import NPU_FLASH_ATTENTION
from kernels_ext_npu.binding.registration import Registration
from kernels_ext_npu.binding.torch_operators import sdpa, varlen_attention
from kernels_ext_npu.catalogue import ATTENTION, INDEXERS
from kernels_ext_npu.matching.classification import BIASED, UNNAMED, torchs_attention, without_code
from kernels_ext_npu.swaps import refusals
from kernels_ext_npu.swaps.attention import (
    attn_implementation,
    calls,
    eligibility,
    flash_attention_requested,
    indexers,
    mla_absorb,
)
from kernels_ext_npu.swaps.attention.attn_implementation import check_and_adjust, set_implementation
from kernels_ext_npu.swaps.attention.eligibility import FLEX
from kernels_ext_npu.swaps.decision import Decision, Finder, Swapping, View
from kernels_ext_npu.transformers_internals import sdpa_drops_biases

LEARNED_BIAS = "it adds a learned bias to scores, which transformers' sdpa drops on NPUs"
_DROPS_MASKS = "_attach_context_parallel_hooks"  # accelerate 1.15.0
# methods of model classes that are replaced, each with what makes the replacement for a class that needs one
_METHODS = {"expand_kv": mla_absorb.replacement_for, "forward": indexers.replacement_for}


def install(registration: Registration) -> None:
    """Register the kernel in transformers' tables, also as ``sdpa`` and flex, unless somebody has replaced these."""
    if not NPU_FLASH_ATTENTION.is_registered():
        return
    patches, is_registered = registration.patches, NPU_FLASH_ATTENTION.is_registered
    table, mask_table = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    patches.items(table, dict.fromkeys(NPU_FLASH_ATTENTION.names, calls.npu_flash_attention))
    patches.items(mask_table, dict.fromkeys(NPU_FLASH_ATTENTION.names, calls.npu_flash_attention_mask))
    for name, attend, mask, ours in (
        ("sdpa", sdpa_attention_forward, sdpa_mask, calls.kernel_or_sdpa),
        (FLEX, flex_attention_forward, flex_attention_mask, calls.kernel_or_flex),
    ):
        if ALL_ATTENTION_FUNCTIONS[name] is attend and mask_table[name] is mask:
            patches.item(table, name, functools.update_wrapper(functools.partial(ours, attend), attend))
            patches.item(mask_table, name, calls.mask_for_kernel(mask))
    flex_attention.install(patches)
    if mask_table["eager"] is eager_mask:
        patches.item(mask_table, "eager", calls.mask_for_kernel(eager_mask))
    # A model's own formula, which the kernel stands in for where there is no sdpa, is an argument and in no table.
    patches.method(AttentionInterface, "get_interface", calls.get_interface, is_registered)
    # Here a model is made: later nobody knows who chose a name, and that of our repository would be downloaded.
    patches.method(PreTrainedModel, "_check_and_adjust_attn_implementation", check_and_adjust, is_registered)
    # Sub-configs get names past that check, and what was named before has to be known for restore().
    patches.method(PreTrainedModel, "set_attn_implementation", set_implementation, is_registered)
    # Only a call tells positions that were given from those that the model counts, which need not be read for masks.
    patches.method(PreTrainedModel, "__call__", calls.call_model, calls.reads_no_positions)
    # It would read positions on the host for each mask, and functions in the table of masks are called too late.
    patches.method(masking_utils, "_preprocess_mask_arguments", calls.preprocess, calls.reads_no_positions)
    accelerator = sys.modules.get("accelerate.accelerator")  # transformers imports it where it is installed
    if accelerator is not None and hasattr(accelerator, _DROPS_MASKS):
        # For torch's context parallelism it refuses windows and removes masks: the kernel computes both there.
        patches.method(accelerator, _DROPS_MASKS, calls.attach_context_parallel_hooks, is_registered)
    # They branch by whether a name has "flash" in it: neither that of ours nor sdpa says what they want to know.
    asking = {file for file in list(sys.modules) if file.startswith("transformers.")}
    flash_attention_requested.patch_files(asking, patches)


def find(view: View) -> Iterator[Decision]:
    """Decide of every module of a model that computes attention, or chooses keys for it."""
    name = NPU_FLASH_ATTENTION.name
    concerned = [cls for cls, facts in view.facts.items() if facts.is_indexer or facts.attends]
    for path, module in view.instances(concerned):
        facts, reason = view.facts[type(module)], _refusal(module)
        present = name if reason is None else None
        if facts.is_indexer:
            yield Decision(path, module, name, reason, present, kind=INDEXERS, is_candidate=False)
        if facts.attends and not _is_called_by_transformers(view, path, module):
            layer = name if eligibility.class_refusal(type(module)) is None else None
            yield Decision(path, module, layer, reason, present, kind=ATTENTION, is_candidate=reason is None)


def remarks(view: View, served: list[Decision]) -> dict[Decision, str | None]:
    """Say of attention that the kernel computes what is not as fast as it could be, or not as without kernels."""
    found = {d: _remark(view.model, d.path, d.module) for d in served if d.kind is ATTENTION}
    return found | {d: indexers.remark(d.module) for d in served if d.kind is INDEXERS}


def put(view: View, decisions: Iterable[Decision], swapping: Swapping) -> None:
    """Let the kernel compute the attention of a model, but not of parts that restore() was called for."""
    for _, module in view.named:
        if eligibility.KERNEL_DISABLED in vars(module) and module not in registration.restored:
            delattr(module, eligibility.KERNEL_DISABLED)
    for model in view.pretrained:
        if model not in registration.restored:
            eligibility.forget_restored(model.config)
    if NPU_FLASH_ATTENTION.is_registered():
        patches = swapping.registration.patches
        for cls in {base for each in view.by_class for base in each.__mro__}:
            for name, replacement_for in _METHODS.items():
                ours = replacement_for(cls, vars(cls)[name]) if name in vars(cls) else None
                if ours is not None and not patches.knows(cls, name):
                    patches.method(cls, name, ours, NPU_FLASH_ATTENTION.is_registered)
        registration.try_package(NPU_FLASH_ATTENTION.repository)


def revert(view: View) -> None:
    """Let a model compute its attention without the kernel, and its config name what it named before."""
    calling = [cls for cls, facts in view.facts.items() if facts.names_attention]
    modules = [module for _, module in view.instances(calling) if eligibility.calls_by_name(module)]
    attn_implementation.take_out(view.pretrained, modules)
    choosing = view.instances([cls for cls, facts in view.facts.items() if facts.is_indexer])
    for module in (*modules, *(module for _, module in choosing)):
        setattr(module, eligibility.KERNEL_DISABLED, True)
        indexers.end_training(module)
    for model in view.pretrained:
        eligibility.note_restored(model.config)


def _function(module: nn.Module) -> str | None:
    """Return the function of torch by which a module attends that asks no config; None if it calls none."""
    is_torchs = isinstance(module, nn.MultiheadAttention)
    return "scaled_dot_product_attention" if is_torchs else torchs_attention(type(module))


def _is_called_by_transformers(view: View, path: str, module: nn.Module) -> bool:
    """Tell whether a module is torch's, inside one of transformers: most of these ask for weights."""
    if not isinstance(module, nn.MultiheadAttention):
        return False
    return type(view.model.get_submodule(path.rpartition(".")[0])).__module__.startswith("transformers.")


def _refusal(module: nn.Module) -> str | None:
    """Return why the kernel does not compute the attention of a module; None where it does."""
    if not NPU_FLASH_ATTENTION.is_registered():
        return refusals.left_out(NPU_FLASH_ATTENTION.repository) or refusals.NOT_REGISTERED
    if indexers.is_indexer(module):
        return indexers.refusal(module)
    if not eligibility.calls_by_name(module):
        name = _function(module)
        is_replaced = varlen_attention.is_replaced() if name == "varlen_attn" else name and sdpa.IS_REPLACED
        return refusals.elsewhere(module) if is_replaced else UNNAMED
    if NPU_FLASH_ATTENTION.is_named_by(module.config):
        return None
    if not (eligibility.names_flex(module.config) or eligibility.serves_config(module.config)):  # type: ignore[arg-type]
        return f"the attention implementation {module.config._attn_implementation} was asked for"  # type: ignore
    if (reason := eligibility.refusal(module, compute_device(module), *_dtype_and_softcap(module))) is not None:
        return refusals.elsewhere(module) if reason is eligibility.ELSEWHERE else reason
    foreign = eligibility.foreign_sdpa(module.config)  # type: ignore[arg-type]
    return foreign and f"another library has replaced the attention implementation sdpa: {foreign}"


def _remark(model: nn.Module, path: str, module: nn.Module) -> str | None:
    """Return what there is to say of attention that the kernel computes; None if nothing."""
    if (foreign := forward_binding.foreign_forward(module)) is not None:
        return refusals.bypassed_by(foreign)
    if is_elsewhere(module):
        return f"in torch, since it is on {compute_device(module)}"
    if not eligibility.calls_by_name(module):
        return refusals.by_torch(_function(module))
    limit = eligibility.limit(module, *_dtype_and_softcap(module))
    if limit in (eligibility.IN_FLOAT64, eligibility.CAPPED, BIASED):  # with all scores in memory
        return f"in torch, {'where' if limit is BIASED else 'since'} {without_code(limit)}"
    from kernels_ext_npu.syntax.learned_masks import has_learned_mask  # for reports alone

    is_added = not eligibility.is_eager_by_default(type(module.config)) and has_learned_mask(model, path)
    return LEARNED_BIAS if is_added and sdpa_drops_biases() else None


def _dtype_and_softcap(module: nn.Module) -> tuple[torch.dtype, Any]:
    is_in_float64 = any(parameter.dtype == torch.float64 for parameter in module.parameters())
    dtype = torch.float64 if is_in_float64 else torch.float32
    return dtype, getattr(module, "attn_logit_softcapping", None)


FINDER = Finder("attention", find, put, install, revert, remarks)
