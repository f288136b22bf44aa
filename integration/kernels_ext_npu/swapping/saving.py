"""Lets transformers and accelerate save packed weights.

safetensors has no views: who saves with it has to tell the two weights in one storage apart. transformers does, with a
copy of each on the device; accelerate takes them for one tensor under two names and drops the second.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from kernels_ext_npu.swapping.patches import Patches


def install(patches: Patches) -> None:
    """Let transformers and accelerate save packed weights as two tensors."""
    from accelerate.utils import other
    from transformers import PreTrainedModel

    patches.attribute(PreTrainedModel, "save_pretrained", _unpacked(PreTrainedModel.save_pretrained))
    original = other.clean_state_dict_for_safetensors
    name, wrapped = original.__name__, _apart(original)
    for package, module in list(sys.modules.items()):
        if package.startswith("accelerate.") and vars(module).get(name) is original:
            patches.attribute(module, name, wrapped)


def _unpacked(original: Any) -> Any:
    """Wrap save_pretrained so that it sees weights in storages of their own.

    That takes no copies, but for one layer at a time.
    """

    @functools.wraps(original)
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        from kernels_ext_npu.swapping import packing  # register() need not wait for references

        pairs = packing.packed(self)
        try:
            for pair in pairs:
                pair.unpack()
            return original(self, *args, **kwargs)
        finally:
            for pair in pairs:
                pair.pack()

    return save_pretrained


def _apart(original: Any) -> Any:
    """Wrap accelerate's function, which gets copies on the host of what shares a storage without sharing a byte."""

    @functools.wraps(original)
    def clean_state_dict_for_safetensors(state_dict: dict) -> dict:
        storages = defaultdict(list)
        for name, tensor in state_dict.items():
            if type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_meta and tensor.numel():
                storages[tensor.device, tensor.untyped_storage().data_ptr()].append(name)
        copies: dict[str, torch.Tensor] = {}
        for names in storages.values():
            tensors = {_extent(state_dict[name]): state_dict[name] for name in names}
            if _are_disjoint(list(tensors.values())):
                moved = {extent: tensor.to("cpu", copy=True) for extent, tensor in tensors.items()}
                # what is tied shares its copy, and is one tensor under two names as before
                copies |= {name: moved[_extent(state_dict[name])] for name in names}
        return original(state_dict | copies)

    return clean_state_dict_for_safetensors


def _are_disjoint(tensors: list[torch.Tensor]) -> bool:
    if len(tensors) < 2 or not all(tensor.is_contiguous() for tensor in tensors):
        return False
    extents = sorted(_extent(tensor) for tensor in tensors)
    return all(end <= start for (_, end), (start, _) in pairwise(extents))


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
