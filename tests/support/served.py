"""Models with kernels on the NPU, and what the report says of them."""

import torch
from torch import nn
from transformers import PreTrainedModel

import kernels_ext_npu
from kernels_ext_npu import Row
from tests.support import zoo


def kernelized(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Build a model of the zoo on the NPU, with kernels."""
    return kernels_ext_npu.kernelize(zoo.build(name, dtype).to("npu"))


def rows(model: nn.Module, kind: str | None = None) -> list[Row]:
    """Return what the report says of all parts of a model, or of those of a kind."""
    return [row for row in kernels_ext_npu.report(model) if kind in (None, row.kind)]


def reasons(model: nn.Module, kind: str | None = None) -> set[str | None]:
    """Return all that is said to them."""
    return {row.reason for row in rows(model, kind)}


def swapped(model: nn.Module, kind: str | None = None) -> set[bool]:
    """Return whether they are swapped: all, some of them, or none."""
    return {row.swapped for row in rows(model, kind)}
