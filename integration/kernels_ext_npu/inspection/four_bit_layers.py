"""Puts bitsandbytes' layers in four bits into a model on fake tensors, as from_pretrained does with a configuration."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel

from kernels_ext_npu.inspection.subject import CannotInspectError

_BLOCK, _NESTED_BLOCK = 64, 256  # bitsandbytes' own sizes of blocks of values, and of their scales


def quantise(model: PreTrainedModel) -> str:
    """Put all linear layers of a model but its head into NF4 with nested scales, and say so in words.

    They compute in the dtype of the model.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise CannotInspectError("--nf4: bitsandbytes is not installed: pip install bitsandbytes")
    heads = {id(module) for module in (model.get_output_embeddings(),) if module is not None}
    layers = [
        (path, module)
        for path, module in model.named_modules()
        if type(module) is nn.Linear and id(module) not in heads
    ]
    if not layers:
        raise CannotInspectError(f"--nf4: {type(model).__name__} has no linear layer beside its head")
    for path, module in layers:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, _in_four_bits(module))
    model.is_loaded_in_4bit = True  # type: ignore[assignment]  # what peft asks
    return ", linear layers in NF4"


def _in_four_bits(layer: nn.Linear) -> nn.Module:
    """Return the layer of bitsandbytes for a linear one, with what it says of its weight."""
    import bitsandbytes

    weight, state = layer.weight, bitsandbytes.functional.QuantState
    blocks = -(-weight.numel() // _BLOCK)
    with _disable_current_modes():  # a fake tensor takes no class of bitsandbytes
        made = bitsandbytes.nn.Linear4bit(layer.in_features, layer.out_features, False, weight.dtype, device="meta")
    packed: Any = nn.Parameter(_empty(weight, (weight.numel() + 1) // 2, 1, dtype=torch.uint8), requires_grad=False)
    nested = state(
        _empty(weight, -(-blocks // _NESTED_BLOCK)), None, _empty(weight, 256), _NESTED_BLOCK, dtype=torch.float32
    )
    scales = _empty(weight, blocks, dtype=torch.uint8)
    made.quant_state = state(
        scales, weight.shape, _empty(weight, 16), _BLOCK, "nf4", weight.dtype, _empty(weight), nested
    )
    # what bitsandbytes and peft ask of a parameter
    packed.quant_state, packed.quant_type, packed.compress_statistics = made.quant_state, "nf4", True
    made.weight, made.bias = packed, layer.bias
    return made.train(layer.training)


def _empty(like: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)
