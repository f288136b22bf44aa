"""The convolutions of transformers: the causal ones before its linear attention and scans, and those of patches.

Of torch's own a kernel takes those whose windows are the patches of a picture.
"""

from typing import Any

from kernels_ext_npu.patterns.pattern import Pattern

# transformers' own scans keep packed sequences not apart; those of mamba-ssm may
_SCANS = ("mamba2_chunk_scan", "mamba_selective_scan")


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


PATTERNS = (
    Pattern("mamba2:causal_conv1d_fn", ("CausalConv1dBeforeScan",), sibling_functions=_SCANS),
    Pattern("mamba2:causal_conv1d_fn", ("CausalConv1d",)),
    Pattern("mamba2:causal_conv1d_update", ("CausalConv1dUpdate",)),
    Pattern("torch:Conv2d", ("PatchEmbedding",), _refuse, rechecks_every_call=True),
    Pattern("torch:Conv3d", ("PatchEmbedding",), _refuse, rechecks_every_call=True),
)
