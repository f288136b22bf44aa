"""What there is to say of the attention of a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from kernels_ext_npu.binding import forward_binding
from kernels_ext_npu.binding.devices import device_of, is_elsewhere
from kernels_ext_npu.catalogue import ATTENTION
from kernels_ext_npu.matching.classification import BIASED, UNNAMED, attends, text_of
from kernels_ext_npu.swaps import refusals
from kernels_ext_npu.swaps.attention import serving
from kernels_ext_npu.swaps.named_implementation import NPU_FLASH_ATTENTION as OURS
from kernels_ext_npu.swaps.protocol import Row


def rows(model: nn.Module) -> Iterator[Row]:
    """Describe every module of a model that computes attention."""
    for path, module in model.named_modules():
        if attends(type(module)):
            yield _row(path, type(module).__name__, module)


def _row(path: str, name: str, module: nn.Module) -> Row:
    if (reason := _refusal(module)) is not None:
        kernel = OURS.name if serving.class_refusal(type(module)) is None else None
        return Row(path, name, kernel, False, reason, is_candidate=False, kind=ATTENTION.in_models)
    stranger = forward_binding.stranger(module)
    reason = _remark(module) if stranger is None else refusals.passed_by(stranger)
    return Row(path, name, OURS.name, True, reason, kind=ATTENTION.in_models)


def _refusal(module: nn.Module) -> str | None:
    """Return why the kernel does not compute the attention of a module; None where it does."""
    if not OURS.is_registered():
        return refusals.left_out(OURS.repository) or refusals.NOT_REGISTERED
    if not serving.calls_by_name(module):
        return UNNAMED
    if OURS.is_named_by(module.config):
        return None
    if not serving.stands_for(module.config):  # type: ignore[arg-type]
        return f"the attention implementation {module.config._attn_implementation} was asked for"  # type: ignore
    if (reason := serving.refusal(module, device_of(module), *_dtype_and_softcap(module))) is not None:
        sentences = {serving.RESTORED: refusals.NOT_ASKED_FOR, serving.ELSEWHERE: refusals.elsewhere(module)}
        return sentences.get(reason, reason)
    stranger = serving.stranger(module.config)  # type: ignore[arg-type]
    return stranger and f"another library has replaced the attention implementation sdpa: {stranger}"


def _remark(module: nn.Module) -> str | None:
    """Return why the kernel computes the attention of a module that names it in torch, with all scores in memory."""
    if is_elsewhere(module):
        return f"in torch, since it is on {device_of(module)}"
    limit = serving.limit(module, *_dtype_and_softcap(module))
    if limit in (serving.IN_FLOAT64, serving.CAPPED, BIASED):
        return f"in torch, {'where' if limit is BIASED else 'since'} {text_of(limit)}"
    return None


def _dtype_and_softcap(module: nn.Module) -> tuple[torch.dtype, Any]:
    is_in_float64 = any(parameter.dtype == torch.float64 for parameter in module.parameters())
    dtype = torch.float64 if is_in_float64 else torch.float32
    return dtype, getattr(module, "attn_logit_softcapping", None)
