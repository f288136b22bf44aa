"""peft's linear layers with adapters of low rank, each as one node of autograd.

A model keeps its modules; a ``peft.tuners.lora.Linear`` over a plain, frozen ``nn.Linear`` gets a forward that gives
the kernel what its class would compute step by step. What decides on that is looked at in every call, since adapters
are added, switched, merged and scaled at any time: where something is in the way its class computes.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules import dropout as dropouts

from kernels_ext_npu.patterns.hooks import has_hooks
from kernels_ext_npu.swapping import ahead, draws, packing, projections, refusals, state
from kernels_ext_npu.swapping.devices import is_elsewhere
from kernels_ext_npu.swapping.own_forwards import OwnForwards
from kernels_ext_npu.swapping.plain_linear import name_of

NAME = "lora_linear"
PAUSED = "its adapters are merged or switched off: it is the layer that it adapts"
_LIBRARY = "peft.tuners.lora.layer"
_MEMBERS = {"merged_adapters", "_disable_adapters", "cast_input_dtype_enabled", "lora_variant", "scaling"}
_DROPOUT = nn.Dropout.forward if getattr(nn.Dropout.forward, "__globals__", None) is vars(dropouts) else None
_WHOLE = "_kernels_ext_npu_whole"  # what the gated units of SwiGLU look for
_WRITTEN = "result = result + lora_B(lora_A(dropout(x))) * scaling"  # what the kernel computes, in peft's words


class _Layer(NamedTuple):
    """What a layer with adapters is computed of.

    Attributes:
        weight: of the frozen layer.
        bias: its bias, or None.
        adapters: for each active one ``a``, ``b``, its scale, and with which probability it drops its input, 0 for
            never; or the module that does, where that is no plain one.
    """

    weight: Tensor
    bias: Tensor | None
    adapters: list[tuple[Tensor, Tensor, float, float | nn.Module]]

    @property
    def tensors(self) -> list[Tensor]:
        """All that a value of it depends on."""
        return [self.weight, *(tensor for a, b, *_ in self.adapters for tensor in (a, b))]


def adapted_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, str | None]]:
    """Find the layers with adapters of a model, each with its path and why its class computes it; None if not."""
    library = sys.modules.get(_LIBRARY)
    if library is None:
        return
    is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    for path, module in model.named_modules():
        if isinstance(module, library.LoraLayer):
            yield path, module, refusal(module, is_sharded)


def is_paused(module: Any) -> bool:
    """Tell whether a layer with adapters computes only what it adapts now."""
    return bool(module.merged_adapters or module.disable_adapters)


def refusal(module: Any, is_sharded: bool = False) -> str | None:
    """Return why a layer with adapters is computed by its class; None if it need not be.

    Args:
        is_sharded: whether FSDP2 shards the model: then its weights are plain while it is called.
    """
    library: Any = sys.modules[_LIBRARY]
    if module in state.restored:
        return refusals.RESTORED
    if (reason := refusals.left_out(projections.REPOSITORY)) is not None:
        return reason
    if type(module) is not library.Linear:
        return f"it is a {name_of(type(module))}: the kernel is for peft's Linear"
    if not (_is_written(library.Linear.forward) and vars(module).keys() >= _MEMBERS):
        return "this release of peft computes adapters in other words"
    if is_elsewhere(module):
        return refusals.elsewhere(module)
    if "forward" in vars(module) and not LAYERS.is_swapped(module):
        return "another library has wrapped its forward"
    base = module.base_layer
    if type(base) is not nn.Linear:
        return f"it adapts a {name_of(type(base))}: the kernel multiplies with numbers alone"
    if (unfit := projections.unfit(base, is_sharded)) is not None:
        return f"of the layer that it adapts: {unfit}"
    if base.weight.requires_grad and not is_paused(module):
        return "the layer that it adapts is trained, too"
    for name in module.active_adapters:
        if (variant := module.lora_variant.get(name)) is not None:
            return f"its adapter {name} is of another kind: {type(variant).__name__}"
        if name in module.lora_A and (module.lora_A[name].bias is not None or module.lora_B[name].bias is not None):
            return f"its adapter {name} has a bias"
    return None


@functools.cache
def _is_written(forward: FunctionType) -> bool:
    """Tell whether a forward computes adapters in the words that the kernel is for."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    except (OSError, SyntaxError, TypeError):
        return False
    return any(ast.unparse(node) == _WRITTEN for node in ast.walk(tree) if isinstance(node, ast.Assign))


@functools.cache
def _forward_with(kernel: ModuleType, matched: FunctionType) -> FunctionType:
    """Return the forward of a layer with adapters, for a kernel: `forward` by name, as a pickle of a model knows it.

    Args:
        kernel: the package.
        matched: what its class computed then.
    """
    adapter = kernel.Adapter

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        is_plain = type(self).forward is matched and not args and not kwargs and _is_plain_call()
        layer = _layer_of(self) if is_plain else None
        if layer is None:
            return type(self).forward(self, x, *args, **kwargs)
        found = ahead.handed_out(self, x, layer.tensors)
        if found is None and (members := ahead.called_next(self)):
            are_plain = all(type(member).forward is matched for member in members)
            found = _computed_together(members, x, kernel) if are_plain else None
        if found is not None:
            return found
        given = [
            adapter(a, b, scale, dropout(self._cast_input_dtype(x, a.dtype)))
            if isinstance(dropout, nn.Module)
            else adapter(a, b, scale, None, dropout)
            for a, b, scale, dropout in layer.adapters
        ]
        return kernel.lora_linear(x, layer.weight, layer.bias, given)

    return forward  # type: ignore[return-value]


def _forward_of_library() -> FunctionType:
    library: Any = sys.modules[_LIBRARY]
    return library.Linear.forward


def _is_plain_call() -> bool:
    return not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())


def _computed_together(members: list[nn.Module], x: Tensor, kernel: ModuleType) -> Tensor | None:
    """Compute a layer and those that are called next with the same input; None if that cannot be."""
    if x.is_inference() or any(has_hooks(member) or not LAYERS.is_swapped(member) for member in members):
        return None
    layers = []
    for member in members:
        layer = _layer_of(member)
        if layer is None or len(layer.adapters) != 1 or isinstance(layer.adapters[0][3], nn.Module):
            return None
        layers.append(layer)
    drop = {layer.adapters[0][3] > 0 for layer in layers}  # type: ignore[operator]
    if len(drop) > 1 or (True in drop and draws.are_captured()):
        return None
    generator = draws.generator_of(x.device) if True in drop else None
    start = 0 if generator is None else generator.get_offset()
    given = [_given(layer, kernel) for layer in layers]
    both = kernel.lora_pair(x, given) if ahead.caller_of(members[0]) in packing.JOINING else None
    first, *others = kernel.lora_linears(x, given) if both is None else _halves(both)
    drawn = None
    if generator is not None and (drawn := draws.put_back(generator, start, len(members))) is None:
        return None
    ahead.keep(x, members[1:], [layer.tensors for layer in layers[1:]], others, drawn)
    return first


def _halves(both: Tensor) -> tuple[Tensor, ...]:
    """Return the halves of what one product gives for gate and up, marked: the unit behind it takes the whole."""
    halves = both.chunk(2, -1)
    for half in halves:
        setattr(half, _WHOLE, both)
    return halves


def apart(gate: nn.Module, up: nn.Module) -> str | None:
    """Return why two layers with adapters that a kernel computes are two products; None if they need not be."""
    if not (LAYERS.is_swapped(gate) and LAYERS.is_swapped(up)):
        return None
    first, second = _layer_of(gate), _layer_of(up)
    if first is None or second is None:
        return "peft computes what they are adapted by"
    if len(first.adapters) != 1 or len(second.adapters) != 1:
        return "one of them has several adapters"
    if first.bias is not None or second.bias is not None:
        return "they have biases beside adapters"
    (*_, scale, dropout), (*_, other_scale, other_dropout) = first.adapters[0], second.adapters[0]
    if dropout != 0 or other_dropout != 0:
        return "each adapter drops other elements of the input"
    if scale != other_scale:
        return "their adapters differ in scale"
    return None


def _given(layer: _Layer, kernel: ModuleType) -> tuple[Tensor, Tensor | None, Any]:
    """Return a layer with one adapter as the kernel takes it."""
    ((a, b, scale, p),) = layer.adapters
    return layer.weight, layer.bias, kernel.Adapter(a, b, scale, None, p)


def _layer_of(module: Any) -> _Layer | None:
    """Return what a layer is computed of now; None where its class has to compute it."""
    modules, members = module._modules, vars(module)
    base = modules["base_layer"]
    if members["merged_adapters"] or members["_disable_adapters"] or not members["cast_input_dtype_enabled"]:
        return None
    if type(base) is not nn.Linear or projections.unfit(base) is not None:
        return None
    weight: Any = base._parameters["weight"]
    if weight.requires_grad or weight.device.type != "npu":
        return None
    adapters: list[Any] = []
    for name in module.active_adapters:
        if name not in modules["lora_A"]._modules:
            continue
        a, b = (_factor(modules[factors]._modules[name]) for factors in ("lora_A", "lora_B"))
        scale = members["scaling"][name]
        if a is None or b is None or name in members["lora_variant"] or not isinstance(scale, (int, float)):
            return None
        if a.dtype is not b.dtype or a.dtype not in (weight.dtype, torch.float32):
            return None
        adapters.append((a, b, scale, _dropout(modules["lora_dropout"]._modules[name])))
    return _Layer(weight, base._parameters["bias"], adapters) if adapters else None


def _factor(layer: Any) -> Tensor | None:
    """Return the weight of a layer that is a product with it and nothing else; None for any other."""
    if type(layer) is not nn.Linear or projections.unfit(layer) is not None or layer._parameters["bias"] is not None:
        return None
    return layer._parameters["weight"]


def _dropout(module: nn.Module) -> float | nn.Module:
    """Return with which probability a dropout drops its input; the module itself where that is no plain one."""
    if has_hooks(module) or "forward" in vars(module):
        return module
    if type(module) is nn.Identity:
        return 0.0
    if type(module) is not nn.Dropout or nn.Dropout.forward is not _DROPOUT or module.inplace or module.p >= 1:
        return module
    return module.p if module.training else 0.0


LAYERS = OwnForwards(
    "lora", adapted_of, lambda: _forward_with(state.package(projections.REPOSITORY), _forward_of_library())
)
