"""Gives torch's own attention a boolean mask in place of one of floats that only masks, while kernels are registered.

torch_npu computes ``F.scaled_dot_product_attention`` by its fused operator where the mask is boolean, or there is none
(op-plugin, ScaledDotProductAttentionKernelNpuOpApi.cpp). For one of floats it holds all scores in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from kernels_ext_npu.binding import registration
from kernels_ext_npu.binding.devices import is_capturing
from kernels_ext_npu.binding.patches import Patches

_NAME = "scaled_dot_product_attention"
_REPOSITORY = "FlashAttention"
_KEYS = ("AutocastPrivateUse1", "AutogradPrivateUse1", "PrivateUse1")  # autocast casts a mask anew at each call
# what a mask of floats is a part of -> its version and the part that was read, and which keys a query sees by that
_read: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def install(patches: Patches) -> None:
    """Look at the mask before each kernel of the operator, until `patches` are undone.

    Do nothing where the kernel of attention was left out, or torch does not give what a kernel replaces, as before 2.9.
    """
    if not (registration.uses(_REPOSITORY) and hasattr(torch.library, "get_kernel")):
        return
    library = torch.library.Library("aten", "IMPL")
    for key in _KEYS:
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{_NAME}", key):
            attend = torch.library.get_kernel(f"aten::{_NAME}", key).call_boxed
            library.impl(_NAME, functools.partial(_attend, attend), key, with_keyset=True, allow_override=True)
    patches.at_the_end(library._destroy)


def _attend(
    attend: Callable[..., Tensor],
    keys: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    if mask is not None and mask.is_floating_point() and query.dim() == 4 and query.dtype != torch.float64:
        is_taken = mask.dtype == query.dtype or torch.is_autocast_enabled("npu")  # which casts both alike
        mask = _as_boolean(mask, (*query.shape[:3], key.shape[2])) if is_taken else mask
    return attend(keys, query, key, value, mask, *args, **kwargs)


def _as_boolean(mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return which keys a query sees, in a shape that the operator takes; the mask itself where it adds to scores.

    One that differs by head is taken for a bias: layers make it anew, and the host would wait in each.

    Args:
        mask: ``[..., N or 1, S_q or 1, S_k or 1]``.
        shape: ``[B, N, S_q, S_k]``.
    """
    if not 2 <= mask.dim() <= 4:
        return mask
    of_all_heads = mask[..., :1, :, :] if mask.dim() > 2 and mask.stride(-3) == 0 else mask
    sizes = (*(1 for _ in shape[mask.dim() :]), *of_all_heads.shape)
    is_known = sizes[1] == 1 and all(size in (1, whole) for size, whole in zip(sizes, shape))
    visible = _visible(of_all_heads) if is_known else None
    return mask if visible is None else visible.view(sizes).expand(-1, -1, *shape[2:])


def _visible(mask: Tensor) -> Tensor | None:
    """Return which keys a query sees by a mask. The host waits once for each, to learn whether it does only that.

    Layers that each take the same part of one are given the same. A query that sees no key is torch's to compute: it
    weighs all keys alike where the mask is finite.
    """
    if type(mask) is not Tensor or mask.requires_grad or torch.compiler.is_compiling() or is_capturing():
        return None
    whole = mask if mask._base is None else mask._base
    part = None if mask.is_inference() else (mask._version, mask.shape, mask.stride(), mask.storage_offset())
    found = _read.get(whole)
    if part is not None and found is not None and found[0] == part:
        return found[1]
    visible = mask == 0
    is_masked_out = mask <= torch.finfo(mask.dtype).min / 2
    only_masks = bool((visible | is_masked_out).all() & visible.any(-1).all())
    _read[whole] = part, visible if only_masks else None
    return visible if only_masks else None
