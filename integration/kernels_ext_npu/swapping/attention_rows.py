"""What there is to say of the attention of a model."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from kernels_ext_npu.catalogue import ATTENTION
from kernels_ext_npu.matching.kinds import attends, attention_refusal
from kernels_ext_npu.swapping import attention_serving, forwards, refusals
from kernels_ext_npu.swapping.attention_names import NAME
from kernels_ext_npu.swapping.protocol import Row


def rows(model: nn.Module) -> Iterator[Row]:
    """Describe every module of a model that computes attention."""
    for path, module in model.named_modules():
        if attends(type(module)):
            yield _row(path, module)


def _row(path: str, module: nn.Module) -> Row:
    name, counted_as = type(module).__name__, ATTENTION.in_models
    if (reason := attention_serving.refusal(module)) is not None:
        kernel = NAME if attention_refusal(type(module)) is None else None
        return Row(path, name, kernel, False, reason, is_candidate=False, kind=counted_as)
    stranger = forwards.stranger(module)
    reason = attention_serving.remark(module) if stranger is None else refusals.passed_by(stranger)
    return Row(path, name, NAME, True, reason, kind=counted_as)
