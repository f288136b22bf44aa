"""Convolutions of torch, of which a kernel takes those whose windows are the patches of a picture."""

from typing import Any

from torch import nn

from kernels_ext_npu.patterns.pattern import patterns_for


def _refuse(conv: Any) -> str | None:
    if conv.stride != conv.kernel_size:
        return f"its windows of {list(conv.kernel_size)} move by {list(conv.stride)}: they are no patches"
    if all(length == 1 for length in conv.kernel_size):
        return "its patches are single points"
    if conv.padding != "valid" and any(conv.padding):
        return f"it pads by {conv.padding}"
    if conv.groups != 1 or any(length != 1 for length in conv.dilation):
        return "it has groups or gaps"
    return None


PATTERNS = patterns_for(("PatchEmbedding",), nn.Conv2d, nn.Conv3d, limits=_refuse, rechecks_every_call=True)
