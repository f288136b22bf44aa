"""Layers whose forward `kernels` binds to the activations of transformers."""

from __future__ import annotations

import torch
from torch import Tensor

from ._common.modules import Layer as _Layer
from .functional import gelu_tanh, quick_gelu


class NewGELU(_Layer):
    """Computes GELU by its formula with tanh and a third power, as GPT-2 does.

    Autocast takes that power, and with it the result, to float32: so it is here.
    """

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_autocast_enabled("npu") and input.device.type == "npu":
            input = input.float()
        return gelu_tanh(input)


class FastGELU(_Layer):
    """Computes GELU by its formula with tanh and products only, as NVIDIA's BERT does."""

    def forward(self, input: Tensor) -> Tensor:
        return gelu_tanh(input)


class QuickGELU(_Layer):
    """Computes ``x * sigmoid(1.702 * x)``, as CLIP does."""

    def forward(self, input: Tensor) -> Tensor:
        return quick_gelu(input)
