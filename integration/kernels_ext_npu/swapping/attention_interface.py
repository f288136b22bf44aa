"""The attention that transformers calls by name.

The kernel FlashAttention is the implementation ``npu_flash_attention``, for who names it, and what ``sdpa`` means on
the NPU while kernels are registered; so does ``eager`` for models that transformers gives nothing better. No config
says so: what reads the name of an implementation, or wraps one, finds what it would without kernels. Where the kernel
does not serve, and on other devices, the function computes that was in its place, from the mask that it would be given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from kernels_ext_npu.swapping import attention_files, attention_names, attention_packing, attention_weights, state
from kernels_ext_npu.swapping.attention_classes import describes, is_eager_by_default, serves
from kernels_ext_npu.swapping.attention_names import NAME, REPOSITORY
from kernels_ext_npu.swapping.attention_serving import is_plain
from kernels_ext_npu.swapping.patches import Patches


def install(patches: Patches) -> None:
    """Register the implementation, and let it stand in for transformers' own, unless somebody has replaced these."""
    functions, masks = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    patches.item(functions, NAME, npu_flash_attention)
    patches.item(masks, NAME, npu_flash_attention_mask)
    if functions["sdpa"] is sdpa_attention_forward and masks["sdpa"] is sdpa_mask:
        ours = functools.partial(stand_in, sdpa_attention_forward)
        patches.item(functions, "sdpa", functools.update_wrapper(ours, sdpa_attention_forward))
        patches.item(masks, "sdpa", _mask_standing_in("sdpa", sdpa_mask))
    if masks["eager"] is eager_mask:
        patches.item(masks, "eager", _mask_standing_in("eager", eager_mask))
    patches.method(AttentionInterface, "get_interface", _get_interface, is_installed)
    attention_names.install(patches)
    attention_files.install(patches)
    attention_packing.install(patches)
    patches.method(PreTrainedModel, "__init__", _loading, is_installed)


def is_installed() -> bool:
    """Tell whether models can be served."""
    return state.uses(REPOSITORY)


def npu_flash_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *args: Any,
    formula: Callable | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of a module: transformers calls this by the name in the module's config.

    Args:
        module: whose attention it is.
        query: ``[B, N, S_q, D]``.
        key: ``[B, N_k, S_k, D]``.
        value: ``[B, N_k, S_k, D_v]``.
        attention_mask: what ``attention_mask`` of the kernel returned, a mask of the caller, or None.
        args: what ``attention_forward`` of the kernel takes.
        formula: the model's own, which computes with ``output_attentions`` on a batch that is not packed.
        kwargs: the same as `args`.

    Returns:
        ``[B, S_q, N, D_v]``, and the weights ``[B, N, S_q, S_k]`` where they are asked for, otherwise None.

    Raises:
        ValueError: sequences are split between devices by torch's context parallelism.
    """
    if _splits_sequences():
        raise ValueError(
            f"{NAME}: context parallelism replaces torch's scaled_dot_product_attention, which is not called here: "
            'choose attn_implementation="sdpa"'
        )
    if formula is not None and kwargs.get("output_attentions") and kwargs.get("cu_seq_lens_q") is None:
        is_causal, indices = getattr(module, "is_causal", True), kwargs.get("indices")
        attention_mask = attention_weights.added(attention_mask, query, key, is_causal, indices)
        return formula(module, query, key, value, attention_mask, *args, **kwargs)
    if attention_mask is None and is_eager_by_default(type(getattr(module, "config", None))):
        kwargs["is_causal"] = False  # its formula leaves out what a mask says
    return state.package(REPOSITORY).attention_forward(module, query, key, value, attention_mask, *args, **kwargs)


def npu_flash_attention_mask(*args: Any, **kwargs: Any) -> Any:
    """Describe the mask of a forward: transformers calls this by the name in the model's config.

    Args:
        args: those of the masks in transformers' ``AttentionMaskInterface``.
        kwargs: the same.
    """
    if is_eager_by_default(type(kwargs.get("config"))):  # its formula knows masks alone, whatever a module says it is
        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return state.package(REPOSITORY).attention_mask(*args, **kwargs)


def stand_in(
    original: Callable,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of a module that names an implementation of transformers, or let that compute it."""
    is_sdpa = original is sdpa_attention_forward
    is_described = not (attention_mask is None or isinstance(attention_mask, Tensor))
    if (
        query.device.type == "npu"
        and query.dtype is not torch.float64
        and kwargs.get("softcap") is None
        and kwargs.get("position_bias") is None
        and not kwargs.get("output_attentions", getattr(module.config, "output_attentions", False))
        and is_installed()
        and serves(type(module), None if is_sdpa else type(module.config))
        and not is_plain(module)
        and (attention_mask is None or _fits(attention_mask, query, key, is_described))
        and not _splits_sequences()
    ):
        if not is_sdpa and attention_mask is None:
            kwargs["is_causal"] = False  # its formula leaves out what a mask says
        return state.package(REPOSITORY).attention_forward(module, query, key, value, attention_mask, *args, **kwargs)
    if not is_sdpa:
        attention_mask = attention_weights.added(attention_mask, query, key)
    elif is_described:
        attention_mask = attention_mask.original(len(query))
    if kwargs.get("cu_seq_lens_q") is not None and attention_files.gives_lengths(type(module)):
        return _one_by_one(original, module, (query, key, value), attention_mask, *args, **kwargs)
    return original(module, query, key, value, attention_mask, *args, **kwargs)


def make_ready() -> None:
    """Let the kernel make now what it makes once a device: the mask that causal attention of all lengths shares."""
    with torch.no_grad():
        state.package(REPOSITORY).flash_attn_func(
            *torch.empty(3, 1, 2, 1, 16, dtype=torch.bfloat16, device="npu"), causal=True
        )


def _loading(original: Callable, self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
    """Make a model, and load the kernel if that takes no network."""
    original(self, *args, **kwargs)
    if state.current is not None and state.current.source != "hub":
        state.try_package(REPOSITORY)


def _mask_standing_in(name: str, original: Callable) -> Callable:
    """Return what stands for a mask function of transformers: on the NPU it describes the mask."""

    @functools.wraps(original)
    def mask(*args: Any, **kwargs: Any) -> Any:
        given, config = kwargs.get("attention_mask"), kwargs.get("config")
        if given is not None and not isinstance(given, Tensor):  # that of the model around
            return given if describes(type(config), name) else given.mask()
        if (
            args
            or torch.device(kwargs.get("device", "cpu")).type != "npu"
            or not is_installed()
            or not describes(type(config), name)
            or getattr(config, "attn_logit_softcapping", None)
            or (given is not None and len(given) != kwargs["batch_size"])
            or state.try_package(REPOSITORY) is None
        ):
            return original(*args, **kwargs)
        return npu_flash_attention_mask(**kwargs)

    return mask


def _get_interface(original: Callable, self: AttentionInterface, implementation: str, default: Callable) -> Callable:
    """Return what a module calls for its attention: for its own formula what stands in for that, and ours knows it."""
    found = original(self, implementation, default)
    if found is npu_flash_attention:
        return functools.partial(found, formula=default)
    return functools.partial(stand_in, found) if implementation == "eager" and found is default else found


def _splits_sequences() -> bool:
    """Tell whether torch's context parallelism is on, whose part of a sequence would not see the others.

    torch and torch_npu exchange keys in what they put into the place of scaled_dot_product_attention for it.
    """
    function = F.scaled_dot_product_attention
    if function is torch._C._nn.scaled_dot_product_attention:
        return False
    return ".tensor.experimental." in (getattr(function, "__module__", None) or "")


def _fits(mask: Any, query: Tensor, key: Tensor, is_described: bool) -> bool:
    """Tell whether a mask is for these tensors: if not, transformers' own says what is wrong with it."""
    if is_described:
        return mask.fits(query.shape[2], key.shape[2])
    sizes = (*query.shape[:3], key.shape[2])
    return mask.dim() == 4 and all(a in (1, b) for a, b in zip(mask.shape[:3], sizes)) and mask.shape[3] >= sizes[3]


def _one_by_one(
    original: Callable, module: nn.Module, tensors: tuple[Tensor, ...], *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute sequences that lie one behind the other, as the file of the module does where it gives no lengths."""
    lengths = torch.diff(kwargs["cu_seq_lens_q"]).tolist()
    parts = zip(*(tensor.split(lengths, dim=2) for tensor in tensors))
    return torch.cat([original(module, *part, *args, **kwargs)[0] for part in parts], dim=1), None
