"""The attention implementation ``npu_flash_attention`` of transformers.

It is the kernel FlashAttention, called by name: who names it gets it, and so do models on the NPU that would have
transformers' default (attention_default.py). On other devices than the NPU the kernel computes in torch. The name
contains "flash", by which transformers knows implementations that take lengths of packed sequences: vision towers and
continuous batching give them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from kernels_ext_npu.swapping import attention_choice, attention_default, attention_files, attention_packing
from kernels_ext_npu.swapping.attention_choice import NAME
from kernels_ext_npu.swapping.patches import Patches


def npu_flash_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of a module: transformers calls this by the name in the module's config.

    Args:
        module: whose attention it is.
        query: ``[B, N, S_q, D]``.
        key: ``[B, N_k, S_k, D]``.
        value: ``[B, N_k, S_k, D_v]``.
        attention_mask: what ``attention_mask`` of the kernel returned, a mask of the caller, or None.
        args: what ``attention_forward`` of the kernel takes.
        kwargs: the same; with ``output_attentions`` the model's own formula computes, on a batch that is not packed.

    Returns:
        ``[B, S_q, N, D_v]``, and the weights ``[B, N, S_q, S_k]`` where they are asked for, otherwise None.

    Raises:
        ValueError: sequences are split between devices by torch's context parallelism.
    """
    if F.scaled_dot_product_attention is not torch._C._nn.scaled_dot_product_attention:  # a comparison costs no call
        _refuse_context_parallelism()
    if kwargs.get("output_attentions") and kwargs.get("cu_seq_lens_q") is None:
        from kernels_ext_npu.swapping import attention_weights  # register() need not wait for references

        if (formula := attention_weights.formula(module)) is not None:
            is_causal = getattr(module, "is_causal", True)
            attention_mask = attention_weights.added(attention_mask, query, key, is_causal)
            return formula(module, query, key, value, attention_mask, *args, **kwargs)
    return attention_choice.kernel().attention_forward(module, query, key, value, attention_mask, *args, **kwargs)


def _refuse_context_parallelism() -> None:
    """Refuse a part of a sequence, which would not see the others.

    torch and torch_npu exchange keys in what they put into the place of scaled_dot_product_attention for it.
    """
    if ".tensor.experimental." in (getattr(F.scaled_dot_product_attention, "__module__", None) or ""):
        raise ValueError(
            f"{NAME}: context parallelism replaces torch's scaled_dot_product_attention, which is not called here: "
            'choose attn_implementation="sdpa"'
        )


def npu_flash_attention_mask(*args: Any, **kwargs: Any) -> Any:
    """Describe the mask of a forward: transformers calls this by the name in the model's config.

    Args:
        args: those of the masks in transformers' ``AttentionMaskInterface``.
        kwargs: the same.
    """
    return attention_choice.kernel().attention_mask(*args, **kwargs)


def install(patches: Patches) -> None:
    """Register the implementation and its mask, and accept the name of the repository on the Hub for it."""
    patches.item(AttentionInterface._global_mapping, NAME, npu_flash_attention)
    patches.item(AttentionMaskInterface._global_mapping, NAME, npu_flash_attention_mask)
    patches.method(PreTrainedModel, "_check_and_adjust_attn_implementation", _check_and_adjust, is_installed)
    patches.method(PreTrainedModel, "set_attn_implementation", _set, is_installed)
    attention_choice.install(patches)
    attention_default.install(patches)
    attention_files.install(patches)
    attention_packing.install(patches)


def is_installed() -> bool:
    """Tell whether models can name the implementation."""
    return attention_default.is_installed()


def make_ready() -> None:
    """Let the kernel make now what it makes once a device: the mask that causal attention of all lengths shares."""
    with torch.no_grad():
        attention_choice.kernel().flash_attn_func(
            *torch.empty(3, 1, 2, 1, 16, dtype=torch.bfloat16, device="npu"), causal=True
        )


def _check_and_adjust(
    original: Callable, self: PreTrainedModel, requested: str | None, *args: Any, **kwargs: Any
) -> str:
    """Return the implementation of a model.

    Ours needs no package to be imported for it, and serves those models too that list the flash attentions that they
    get on with: none of these has a build for the NPU.
    """
    if attention_choice.meant(requested) != NAME:
        implementation = original(self, requested, *args, **kwargs)
        if kwargs.get("is_init_check"):
            attention_choice.note(self.config, requested)
        return implementation
    if not attention_choice.can_take_it(type(self)):
        default = original(self, None, *args, **kwargs)
        attention_choice.keeps_its_own(type(self), default)
        return default
    attention_choice.adopt(self)
    attention_choice.try_to_load()
    return NAME


def _set(original: Callable, self: PreTrainedModel, requested: str | dict, *args: Any, **kwargs: Any) -> None:
    requested = attention_choice.meant(requested)
    with attention_choice.noted(self, requested):
        original(self, requested, *args, **kwargs)
    attention_default.withdraw(self)
