"""How the weights of experts lie in memory: as transformers stores them, or so that the forward needs no views."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from kernels_ext_npu.binding.models import check_is_module
from kernels_ext_npu.swaps.experts import saving
from kernels_ext_npu.swaps.experts.serving import served

Model = TypeVar("Model", bound=nn.Module)


def transpose_experts(model: Model) -> Model:
    """Store the weights of experts so that the forward multiplies with contiguous matrices.

    transformers stores most of them the other way around, and ``npu_grouped_matmul`` is given transposed views. Stored
    like this, the views fall to the gradient of the input: it suits inference and frozen experts, where it is faster,
    which the device at hand has to tell. Nothing is held twice: the parameters are moved, one after the other.
    restore(model) moves them back, but for those that somebody else holds by then. Until then they are not contiguous:
    what views a parameter as one row, such as torch's ``parameters_to_vector``, raises.

    Returns:
        The model itself.

    Raises:
        TypeError: it is no module, such as the name of a model.
        ValueError: no experts of the model are served by the kernel, or a weight cannot be moved.

    Example:
        >>> import softnpu  # before torch, on a machine without an NPU
        >>> import kernels_ext_npu
        >>> from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
        >>> config = Qwen3MoeConfig(hidden_size=32, moe_intermediate_size=16, num_hidden_layers=1, num_experts=4)
        >>> model = kernels_ext_npu.kernelize(Qwen3MoeForCausalLM(config).to("npu"))
        >>> weight = model.model.layers[0].mlp.experts.down_proj
        >>> weight.shape, weight.stride()
        (torch.Size([4, 32, 16]), (512, 16, 1))
        >>> model = kernels_ext_npu.transpose_experts(model)
        >>> weight.shape, weight.stride()
        (torch.Size([4, 32, 16]), (512, 1, 32))
    """
    check_is_module("transpose_experts", model)
    found = served(model)
    if not found:
        raise ValueError(
            "transpose_experts: the model has no experts with a kernel: load it with device_map='npu' after "
            "register(), and look at report(model)"
        )
    moved = [(w, kernel.layout) for module, kernel in found if not module.is_transposed for w in _weights(module)]
    for weight, layout in moved:  # all or none
        if (reason := layout.immovable(weight)) is not None:
            raise ValueError(f"transpose_experts: {reason}: it would not follow. Let go of it first, nothing has moved")
    saving.install()
    for weight, layout in moved:
        layout.store_transposed(weight)
    return model


def move_back(module: nn.Module, layout: Any) -> None:
    """Store the weights of an experts module as transformers does, where nobody else holds them."""
    for weight in _weights(module):
        if weight.dim() == 3 and weight.mT.is_contiguous() and layout.immovable(weight) is None:
            layout.store_contiguous(weight)


def _weights(module: Any) -> list[nn.Parameter]:
    weights = (module._parameters.get(name) for name in ("gate_up_proj", "up_proj", "down_proj"))
    return [weight for weight in weights if weight is not None]
