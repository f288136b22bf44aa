"""Gives a model on fake tensors adapters of low rank, as peft does."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kernels_ext_npu.inspection.subject import CannotInspectError
from kernels_ext_npu.swapping.patches import Patches


def adapt(model: PreTrainedModel, rank: int) -> str:
    """Give all linear layers of a model but its head adapters in float32, as peft makes them, and say so in words.

    Raises:
        CannotInspectError: peft is not installed, or adapts nothing of the model.
    """
    if importlib.util.find_spec("peft") is None:
        raise CannotInspectError("--lora: peft is not installed: pip install peft")
    from peft import LoraConfig, inject_adapter_in_model

    def stay(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return module  # it was made where it belongs, and fake tensors cannot be moved

    patches = Patches()
    patches.attribute(nn.Module, "to", stay)
    try:
        with torch.device("npu"):
            inject_adapter_in_model(LoraConfig(r=rank, target_modules="all-linear"), model)
    except ValueError as error:
        raise CannotInspectError(f"--lora: {error}") from error
    finally:
        patches.undo()
    return f", with adapters of rank {rank}"
