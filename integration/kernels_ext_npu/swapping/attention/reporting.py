"""What there is to say of the attention of a model."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from kernels_ext_npu.catalogue import ATTENTION
from kernels_ext_npu.matching.kinds import BIASED, UNNAMED, attends, attention_refusal, why
from kernels_ext_npu.swapping import refusals, state
from kernels_ext_npu.swapping.attention import serving
from kernels_ext_npu.swapping.devices import device_of, is_elsewhere
from kernels_ext_npu.swapping.named_implementation import NPU_FLASH_ATTENTION as OURS
from kernels_ext_npu.swapping.protocol import Row


def rows(model: nn.Module) -> Iterator[Row]:
    """Describe every module of a model that computes attention."""
    for path, module in model.named_modules():
        if attends(type(module)):
            yield _row(path, module)


def _row(path: str, module: nn.Module) -> Row:
    name, counted_as = type(module).__name__, ATTENTION.in_models
    if (reason := _refusal(module)) is not None:
        kernel = OURS.name if attention_refusal(type(module)) is None else None
        return Row(path, name, kernel, False, reason, is_candidate=False, kind=counted_as)
    stranger = refusals.replaced(module)
    reason = _remark(module) if stranger is None else refusals.passed_by(stranger)
    return Row(path, name, OURS.name, True, reason, kind=counted_as)


def _refusal(module: nn.Module) -> str | None:
    """Return why the kernel does not compute the attention of a module; None where it does."""
    if state.current is None:
        return refusals.NOT_REGISTERED
    if (left_out := refusals.left_out(OURS.repository)) is not None:
        return left_out
    if not serving.calls_by_name(module):
        return UNNAMED
    if OURS.is_named_by(module.config):
        return None
    if serving.PLAIN in vars(module):
        return refusals.NOT_ASKED_FOR
    if not serving.stands_for(module.config):  # type: ignore[arg-type]
        return f"the attention implementation {module.config._attn_implementation} was asked for"  # type: ignore
    if (limit := _limit(module)) is not None:
        return limit
    if is_elsewhere(module):
        return refusals.elsewhere(module)
    stranger = serving.stranger(module.config)  # type: ignore[arg-type]
    return stranger and f"another library has replaced the attention implementation sdpa: {stranger}"


def _remark(module: nn.Module) -> str | None:
    """Return why the kernel computes the attention of a module that names it in torch, with all scores in memory."""
    if is_elsewhere(module):
        return f"in torch, since it is on {device_of(module)}"
    limit = _limit(module)
    if limit in (serving.IN_FLOAT64, serving.CAPPED, BIASED):
        return f"in torch, {'where' if limit == BIASED else 'since'} {why(limit)[1]}"
    return None


def _limit(module: nn.Module) -> str | None:
    is_in_float64 = any(parameter.dtype == torch.float64 for parameter in module.parameters())
    dtype = torch.float64 if is_in_float64 else torch.get_default_dtype()
    return serving.limit(module, dtype, getattr(module, "attn_logit_softcapping", None))
