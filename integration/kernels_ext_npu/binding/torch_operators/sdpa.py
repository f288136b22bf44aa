"""Computes torch's own ``scaled_dot_product_attention`` by the kernel, in any code, while kernels are registered.

torch_npu calls the fused operator in a layout for which tensors that lie as ``[B, S, N, D]`` are copied, makes a
causal mask anew at each call, inverts a mask that it is given, and holds all scores in memory for one of floats:
op-plugin, ScaledDotProductAttentionKernelNpuOpApi.cpp.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad
from torch.utils.weak import WeakTensorKeyDictionary

from kernels_ext_npu.binding import registration
from kernels_ext_npu.binding.devices import is_capturing
from kernels_ext_npu.binding.patches import Patches

_NAME = "scaled_dot_product_attention"
_REPOSITORY = "FlashAttention"
IS_REPLACED = hasattr(torch.library, "get_kernel")  # from torch 2.9 on, which gives what a kernel replaces
_PROXY = torch._C._TorchDispatchModeKey.PROXY  # which make_fx traces by
KINDS = (Tensor, FakeTensor)  # of tensors that lie on one device, or would
# what a mask of floats is a part of -> its version and the part that was read, and which keys a query sees by that
_read: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_is_left: ContextVar[bool] = ContextVar("_is_left", default=False)


def install(patches: Patches) -> None:
    """Put ours in front of the operator's kernels until `patches` are undone.

    Do nothing where the kernel was left out.
    """
    if not (IS_REPLACED and registration.uses(_REPOSITORY)):
        return
    library = torch.library.Library("aten", "IMPL")
    # autocast would cast a mask anew at each call
    for key, ours in ("AutocastPrivateUse1", _cast), ("AutogradPrivateUse1", _attend), ("PrivateUse1", _attend):
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{_NAME}", key):
            torchs = torch.library.get_kernel(f"aten::{_NAME}", key).call_boxed
            library.impl(_NAME, functools.partial(ours, torchs), key, with_keyset=True, allow_override=True)
    patches.at_the_end(library._destroy)


def left_to_torch(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call a function in which the attention of torch is torch_npu's, as without kernels."""
    if torch.compiler.is_compiling():  # where it is
        return function(*args, **kwargs)
    token = _is_left.set(True)
    try:
        return function(*args, **kwargs)
    finally:
        _is_left.reset(token)


def _cast(
    torchs: Callable[..., Tensor],
    keys: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> Tensor:
    mask, is_causal = _whole(mask, is_causal, q, k)
    return torchs(keys, q, k, v, as_boolean(mask, q, k), dropout, is_causal, **kwargs)


def _attend(
    torchs: Callable[..., Tensor],
    keys: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    mask, is_causal = _whole(mask, is_causal, query, key)
    if mask is not None and mask.dtype == query.dtype:  # other floats torch refuses
        mask = as_boolean(mask, query, key)
    given_mask = mask if mask is None else mask[(None,) * (4 - mask.dim())]
    fits = _fits(query, key, value, given_mask, is_causal, enable_gqa)
    kernel = registration.try_package(_REPOSITORY) if fits else None
    if kernel is not None:
        spec = kernel.attention_spec.AttentionSpec(1.0, dropout)
        if kernel.ops.limits.is_fused(query, key, value, spec):
            given = query, key, value, given_mask, dropout, scale
            return kernel.attention_forward(None, *given, is_causal=is_causal)[0].transpose(1, 2)
    return torchs(keys, query, key, value, mask, dropout, is_causal, scale=scale, enable_gqa=enable_gqa)


def _whole(mask: Any, is_causal: bool, query: Tensor, key: Tensor) -> tuple[Any, bool]:
    """Return a mask and whether attention is causal, in the mask where there is one.

    Torch computes both on the CPU, and refuses them on the NPU.
    """
    if mask is None or not is_causal:
        return mask, is_causal
    visible = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=mask.device).tril()
    return mask & visible if mask.dtype is torch.bool else mask.masked_fill(~visible, -torch.inf), False


def _fits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, enable_gqa: bool) -> bool:
    """Tell whether the kernel takes such tensors, ``[B, N, S, D]``, and such a mask, and computes what torch does."""
    if _is_left.get() or torch.compiler.is_compiling():
        return False
    tensors = (query, key, value) if mask is None else (query, key, value, mask)
    if any(type(each) not in KINDS or each.dim() != 4 for each in tensors):
        return False
    batch, heads, queries, size = query.shape
    keys = key.shape[2]
    is_known = key.shape == (batch, key.shape[1], keys, size) and value.shape[:3] == key.shape[:3]
    if not is_known or (heads != key.shape[1] and not enable_gqa):
        return False
    if mask is None:
        return not is_causal or queries == keys  # otherwise torch's first query stands at the first key
    allowed = ((1, batch), (1, heads), (1, queries), (keys,))
    return mask.dtype is torch.bool and not is_causal and all(map(tuple.__contains__, allowed, mask.shape))


def as_boolean(mask: Any, query: Tensor, key: Tensor) -> Any:
    """Return which keys a query sees, ``[B or 1, 1, S_q, S_k]``; a mask itself where it adds to scores.

    One that differs by head is taken for a bias: layers make it anew, and the host would wait in each. So is one that
    leaves a query no key: where it is finite, torch weighs all keys alike.
    """
    if not (type(mask) is Tensor and mask.is_floating_point() and query.dim() == 4 and 2 <= mask.dim() <= 4):
        return mask
    if mask.requires_grad or _is_left.get() or torch.compiler.is_compiling() or is_capturing():
        return mask
    # the fused operator loses tangents, and a trace would keep what was read of this mask
    if forward_ad._current_level >= 0 or torch._C._get_dispatch_mode(_PROXY) is not None:
        return mask
    part = mask[..., :1, :, :] if mask.dim() > 2 and mask.stride(-3) == 0 else mask
    sizes, shape = (*(1 for _ in range(part.dim(), 4)), *part.shape), (len(query), 1, query.shape[2], key.shape[2])
    if not all(size in (1, whole) for size, whole in zip(sizes, shape)):
        return mask
    visible = _visible(part, sizes, shape[2:])
    return mask if visible is None else visible


def _visible(mask: Tensor, sizes: tuple[int, ...], lengths: tuple[int, int]) -> Tensor | None:
    """Return which keys a query sees by a mask of some sizes; None where it does more than that.

    The host waits once for each, to learn whether it does. Layers that take the same part of one are given the same.
    """
    whole = mask if mask._base is None else mask._base
    part = None if mask.is_inference() else (mask._version, mask.shape, mask.stride(), mask.storage_offset(), lengths)
    found = _read.get(whole)
    if part is not None and found is not None and found[0] == part:
        return found[1]
    is_zero, is_lowest = mask == 0, mask <= torch.finfo(mask.dtype).min / 2
    only_masks = bool((is_zero | is_lowest).all() & is_zero.any(-1).all())
    visible = is_zero.view(sizes).expand(-1, -1, *lengths) if only_masks else None
    _read[whole] = part, visible
    return visible
