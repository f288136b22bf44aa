"""List the models of the zoo that call rotary functions, and run them."""

import importlib
from types import ModuleType

import torch
from torch import Tensor, nn

import kernels_ext_npu
from tests.support import zoo


def modeling(name: str) -> ModuleType:
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def calls(model: nn.Module) -> list[kernels_ext_npu.Row]:
    return [row for row in kernels_ext_npu.report(model) if row.kind == "rotary calls"]


@torch.no_grad()
def forward(model: nn.Module, name: str) -> Tensor:
    return zoo.logits(name, model)
