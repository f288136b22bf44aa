"""What a module of attention is by itself: whether it calls an implementation by name, and why ours is not for it."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedConfig

from kernels_ext_npu.matching import kinds

CAPPED = "no operator: scores are capped, which none of torch_npu does"


def calls_by_name(module: nn.Module) -> bool:
    """Tell whether the forward of a module calls the attention that its config names."""
    is_one = kinds.calls_attention_by_name(type(module))
    return is_one and isinstance(getattr(module, "config", None), PreTrainedConfig)


def refusal(module: nn.Module) -> str | None:
    """Return why the kernel would not do better than the implementation of a module; None where it does."""
    if is_in_float64(module):
        return "device limit: it is in float64"
    return CAPPED if caps(module) else kinds.attention_refusal(type(module))


def is_in_float64(module: nn.Module) -> bool:
    """Tell whether a module computes in float64, which the operators do not take."""
    return any(parameter.dtype == torch.float64 for parameter in module.parameters())


def caps(module: nn.Module) -> bool:
    """Tell whether a module of attention has a softcap."""
    return bool(getattr(module, "attn_logit_softcapping", None))
