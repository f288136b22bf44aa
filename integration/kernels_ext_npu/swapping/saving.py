"""Lets safetensors write experts that transpose_experts() has laid the other way around.

A file of safetensors holds contiguous tensors only, and its functions refuse all others, but for transformers' own
save_pretrained(), which copies them. What is written here is a copy on the host of such weights alone.
"""

from __future__ import annotations

import functools
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
        if isinstance(tensors, dict) and any(map(_is_transposed, tensors.values())):
            tensors = {name: t.cpu().contiguous() if _is_transposed(t) else t for name, t in tensors.items()}
        return original(tensors, *args, **kwargs)

    return flatten


def _is_transposed(tensor: Any) -> bool:
    """Tell whether a tensor lies as the weights of experts do that were transposed: ``[E, A, B]`` as ``[E, B, A]``."""
    is_one = isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and tensor.device.type == "npu"
    return is_one and tensor.dim() == 3 and not tensor.is_contiguous() and tensor.mT.is_contiguous()
