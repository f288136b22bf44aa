"""How the weights of experts lie in memory: as transformers stores them, or so that the forward needs no views.

A file of safetensors holds contiguous tensors only: its functions refuse all others, and other libraries make all
tensors contiguous before they write, where these lie, so that experts would be on the device twice. All of them get a
copy of such weights on the host instead, from the first transposed experts on, also after unregister(): models keep the
layout of their weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from kernels_ext_npu.binding.devices import check_is_module
from kernels_ext_npu.swaps.experts.serving import served

Model = TypeVar("Model", bound=nn.Module)

_DUPLICATES = "_remove_duplicate_names"  # what save_model() calls with its state dict, before it makes that contiguous
_GIVEN_TENSORS = (  # functions, by one of which all passes that is saved
    ("safetensors.torch", "_flatten_as_ptr"),
    ("safetensors.torch", _DUPLICATES),
    ("transformers.modeling_utils", "remove_tied_weights_from_state_dict"),
    ("huggingface_hub.serialization._torch", "_clean_state_dict_for_safetensors"),
    ("accelerate.utils.other", "clean_state_dict_for_safetensors"),
    ("accelerate.accelerator", "clean_state_dict_for_safetensors"),
)


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
    found = served([*model.modules()])
    if not found:
        raise ValueError(
            "transpose_experts: the model has no experts with a kernel: load it with device_map='npu' after "
            "register(), and look at report(model)"
        )
    moved = [(w, kernel.layout) for module, kernel in found if not module.is_transposed for w in _weights(module)]
    for weight, layout in moved:  # all or none
        if (reason := layout.immovable(weight)) is not None:
            raise ValueError(f"transpose_experts: {reason}: it would not follow. Let go of it first, nothing has moved")
    _save_from_the_host()
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


@functools.cache
def _save_from_the_host() -> None:
    """Let all that saves get copies on the host, once a process. What is not installed is passed by."""
    for module, name in _GIVEN_TENSORS:
        try:
            owner = import_module(module)
        except ImportError:
            continue
        if name in vars(owner):
            setattr(owner, name, _given_on_the_host(vars(owner)[name], in_place=name == _DUPLICATES))


def _given_on_the_host(original: Callable, in_place: bool) -> Callable:
    """Wrap a function that gets tensors to save first; in place if its caller goes on with the dictionary."""

    @functools.wraps(original)
    def call(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensors, dict):
            copies = _copies_on_the_host(tensors)
            if in_place:
                tensors.update(copies)
            elif copies:
                tensors = tensors | copies
        return original(tensors, *args, **kwargs)

    return call


def _copies_on_the_host(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """Copy what is transposed. What had two names has them after that, so that savers drop or refuse it as ever."""
    copies: dict[tuple, Tensor] = {}
    places = {name: (t.device, t.data_ptr(), t.shape) for name, t in tensors.items() if _is_transposed(t)}
    return {name: copies.setdefault(place, tensors[name].cpu().contiguous()) for name, place in places.items()}


def _is_transposed(tensor: Any) -> bool:
    """Tell whether a tensor lies as the weights of experts do that were transposed: ``[E, A, B]`` as ``[E, B, A]``."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided or tensor.dim() != 3:
        return False
    return tensor.device.type in ("npu", "cpu") and not tensor.is_contiguous() and tensor.mT.is_contiguous()
