"""Linear layers that get gradients of their weights as the weights lie, so that autograd copies none of them.

A model keeps its modules; each plain ``nn.Linear`` gets a forward that computes what its class computes, and that asks
the kernel where a gradient of its weight is needed. Layers that a module calls with one input are one node of autograd
(ahead.py).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from kernels_ext_npu.catalogue import MLPS
from kernels_ext_npu.patterns.hooks import has_hooks
from kernels_ext_npu.swapping import ahead, heads, loaded, packing, refusals, state
from kernels_ext_npu.swapping.devices import is_elsewhere
from kernels_ext_npu.swapping.experts.serving import is_called_by_name
from kernels_ext_npu.swapping.forwards import kernel_forward
from kernels_ext_npu.swapping.own_forwards import OwnForwards
from kernels_ext_npu.swapping.plain_linear import FORWARD, PLAIN, name_of

REPOSITORY = "Linear"
NAME = "linear"
PART = "it is a part of what is served as a whole, or kept so: "
_TUNERS = "peft.tuners.tuners_utils"


def projections_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, str | None]]:
    """Find the linear layers of a model, each with its path and why it keeps its forward; None if it need not."""
    others = _parts(model)
    is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and not heads.is_swapped(module):
            yield path, module, others.get(module) or refusal(module, is_sharded)


def refusal(module: nn.Module, is_sharded: bool = False) -> str | None:
    """Return why a linear layer keeps its forward, whatever it is part of; None if it need not.

    Args:
        is_sharded: whether FSDP2 shards the model: then its weights are plain while it is called.
    """
    if module in state.restored:
        return refusals.RESTORED
    if (reason := refusals.left_out(REPOSITORY)) is not None:
        return reason
    if type(module) is not nn.Linear:
        return f"it is a {name_of(type(module))}, which may compute something else"
    if is_elsewhere(module):
        return refusals.elsewhere(module)
    return unfit(module, is_sharded)


def unfit(module: nn.Module, is_sharded: bool = False) -> str | None:
    """Return why an ``nn.Linear`` may not be computed by something else than a call of it; None if it may."""
    if nn.Linear.forward is not FORWARD:
        return "the forward of all linear layers was replaced"
    if "forward" in vars(module) and not LAYERS.is_swapped(module):
        return "another library has wrapped its forward"
    if has_hooks(module):
        return "hooks watch its calls"
    weight = module._parameters.get("weight")
    if weight is None or hasattr(weight, "_fsdp_flattened"):
        return "its weight is a part of another tensor, as under FSDP1"
    if type(weight) not in PLAIN and not (is_sharded and isinstance(weight, DTensor)):
        return f"its weight is a {name_of(type(weight))}: the kernel multiplies with numbers alone"
    return None


@functools.cache
def _forward_with(kernel: ModuleType) -> FunctionType:
    """Return the forward of a linear layer, for a kernel: `forward` by name, as a pickle of a model knows it."""
    linear = kernel.linear

    def forward(self: nn.Linear, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return type(self).forward(self, input)
        if torch.is_grad_enabled() and type(self) is nn.Linear and nn.Linear.forward is FORWARD:
            parameters = self._parameters
            weight = parameters.get("weight")
            if type(weight) in PLAIN and weight.requires_grad:  # type: ignore[union-attr]
                found = ahead.handed_out(self, input, (weight,))  # type: ignore[arg-type]
                if found is None and (members := ahead.called_next(self)):
                    found = _computed_together(members, input, kernel)
                return linear(input, weight, parameters["bias"]) if found is None else found
        return type(self).forward(self, input)

    return forward  # type: ignore[return-value]


def _computed_together(members: list[nn.Module], x: Tensor, kernel: ModuleType) -> Tensor | None:
    """Compute a layer and those that are called next with the same input; None if that cannot be."""
    if x.is_inference() or not all(_is_trained(member) for member in members):
        return None
    weights, biases = zip(*[(m._parameters["weight"], m._parameters["bias"]) for m in members], strict=True)
    first, *others = kernel.linears(x, weights, biases)
    ahead.keep(x, members[1:], [(weight,) for weight in weights[1:]], others)
    return first


def _is_trained(module: nn.Module) -> bool:
    """Tell whether a layer is a plain one now that needs a gradient of its weight, and that nobody watches."""
    if type(module) is not nn.Linear or not LAYERS.is_swapped(module) or has_hooks(module):
        return False
    weight = module._parameters.get("weight")
    return type(weight) in PLAIN and weight.requires_grad and not weight.is_meta  # type: ignore[union-attr]


def _parts(model: nn.Module) -> dict[nn.Module, str]:
    """Return the linear layers whose weights are read by what they are part of, each with the reason to keep it.

    Those are what kernels serve, and layers with adapters. An MLP whose gate and up are one layer calls its layers, and
    they are no less plain in it.
    """
    found: dict[nn.Module, str] = {}
    for module in model.modules():
        whole = _whole(module)
        if whole is not None:
            found |= {child: f"{PART}{whole}" for child in module.modules() if isinstance(child, nn.Linear)}
    return found


def _whole(module: nn.Module) -> str | None:
    """Return the name of what reads the weights of the layers in it; None where a module does not."""
    tuners: Any = sys.modules.get(_TUNERS)
    if tuners is not None and isinstance(module, tuners.BaseTunerLayer):
        return name_of(type(module))
    forward = kernel_forward(module)
    if forward is None:
        return type(module).__name__ if is_called_by_name(module) else None
    layer = loaded.layer_name(forward)
    return None if layer in MLPS.layers and layer not in packing.WITH_GATE_AND_UP else layer


LAYERS = OwnForwards("linear", projections_of, lambda: _forward_with(state.package(REPOSITORY)))
