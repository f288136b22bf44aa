"""The convolutions of transformers: the causal ones before its linear attention and scans, and those of patches.

Of the causal ones hidden_states are ``[B, C, T]``, weights ``[C, K]``, the state ``[B, C, W]``. Of torch's own a kernel
takes those whose windows are the patches of a picture.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN

from kernels_ext_npu.patterns.pattern import Pattern, patterns_for

# transformers' own scans keep packed sequences not apart; those of mamba-ssm may
_SCANS = ("mamba2_chunk_scan", "mamba_selective_scan")


def causal_conv1d_update(hidden_states, conv_state, weight, bias=None, activation=None):
    """Convolve new tokens behind the state, which takes them in."""
    _, hidden_size, seq_len = hidden_states.shape
    state_len = conv_state.shape[-1]
    hidden_states_new = torch.cat([conv_state, hidden_states], dim=-1).to(weight.dtype)
    conv_state.copy_(hidden_states_new[:, :, -state_len:])
    out = F.conv1d(hidden_states_new, weight.unsqueeze(1), bias, padding=0, groups=hidden_size)
    out = out[:, :, -seq_len:]
    if activation is not None:
        out = ACT2FN[activation](out)
    return out.to(hidden_states.dtype)


def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None, **kwargs):
    """Convolve each channel with the tokens before."""
    _, hidden_size, seq_len = hidden_states.shape
    padding = weight.shape[-1] - 1
    out = F.conv1d(
        hidden_states.to(weight.dtype), weight=weight.unsqueeze(1), bias=bias, padding=padding, groups=hidden_size
    )[:, :, :seq_len]
    if activation is not None:
        out = ACT2FN[activation](out)
    return out.to(hidden_states.dtype)


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
    Pattern(causal_conv1d_fn, ("CausalConv1dBeforeScan",), sibling_functions=_SCANS),
    Pattern(causal_conv1d_fn, ("CausalConv1d",)),
    Pattern(causal_conv1d_update, ("CausalConv1dUpdate",)),
    *patterns_for(("PatchEmbedding",), nn.Conv2d, nn.Conv3d, limits=_refuse, rechecks_every_call=True),
)
