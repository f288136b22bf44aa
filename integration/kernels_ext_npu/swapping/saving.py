"""Lets safetensors write experts that transpose_experts() has laid the other way around.

A file of safetensors holds contiguous tensors only, and its functions refuse all others, but for transformers' own
save_pretrained(), which copies them. What is written here is a copy on the host of such weights alone. What another
library copies to the host before it writes lies there as it lay on the NPU.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch

from kernels_ext_npu.swapping.patches import Patches

_WRITERS = ("_flatten_as_ptr", "_flatten")  # of this and of former releases: all that safetensors writes passes them


def install(patches: Patches) -> None:
    """Let safetensors copy what is transposed when it writes."""
    import safetensors.torch

    for name in _WRITERS:
        original = vars(safetensors.torch).get(name)
        if original is not None:
            patches.attribute(safetensors.torch, name, _contiguous(original))


def _contiguous(original: Any) -> Any:
    """Wrap what reads the tensors that are to be written."""

    @functools.wraps(original)
    def flatten(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        return original(_on_the_host(tensors) if isinstance(tensors, dict) else tensors, *args, **kwargs)

    return flatten


def _on_the_host(tensors: dict[str, Any]) -> dict[str, Any]:
    """Copy what is transposed, but for what has two names: safetensors refuses that, and would not see it in copies."""
    transposed = {name: tensor for name, tensor in tensors.items() if _is_transposed(tensor)}
    if not transposed:
        return tensors
    names = Counter(t.untyped_storage().data_ptr() for t in tensors.values() if isinstance(t, torch.Tensor))
    alone = {name: t for name, t in transposed.items() if names[t.untyped_storage().data_ptr()] == 1}
    return tensors | {name: tensor.cpu().contiguous() for name, tensor in alone.items()}


def _is_transposed(tensor: Any) -> bool:
    """Tell whether a tensor lies as the weights of experts do that were transposed: ``[E, A, B]`` as ``[E, B, A]``."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        return False
    is_near = tensor.device.type in ("npu", "cpu")
    return is_near and tensor.dim() == 3 and not tensor.is_contiguous() and tensor.mT.is_contiguous()
