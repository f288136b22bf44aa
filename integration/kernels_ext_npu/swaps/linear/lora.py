"""peft's linear layers with adapters of low rank, each as one node of autograd.

A model keeps its modules; a ``peft.tuners.lora.Linear`` over a plain, frozen ``nn.Linear``, or one of bitsandbytes' in
few bits, gets a forward that gives the kernel what its class would compute step by step. What decides on that is looked
at in every call, since adapters are added, switched, merged and scaled at any time: where something is in the way its
class computes.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterable, Sequence
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules import dropout as dropouts

from kernels_ext_npu.binding import registration
from kernels_ext_npu.binding.loaded_kernels import class_forward, forward_owner
from kernels_ext_npu.catalogue import MLPS, PROJECTIONS
from kernels_ext_npu.module_state import TORCH_CALL, has_hooks
from kernels_ext_npu.reasons import Reason
from kernels_ext_npu.swaps import gate_up_layout, refusals
from kernels_ext_npu.swaps.decision import Decision, Finder, Swapping, View, bind_forwards
from kernels_ext_npu.swaps.linear import compressed_linear, linear_groups
from kernels_ext_npu.swaps.linear.linear_groups import LORA
from kernels_ext_npu.swaps.linear.plain_linear import WRAPPED, is_quantised, qualified_name, why_kept, why_not_plain
from kernels_ext_npu.syntax.source_tree import function_tree

REPOSITORY = "Linear"
NAME = "lora_linear"
PAUSED = Reason("paused", "its adapters are merged or switched off: it is the layer that it adapts")
_LIBRARY, _LIBRARY_OF_QUANTISED = "peft.tuners.lora.layer", "peft.tuners.lora.bnb"
_MEMBERS = {"merged_adapters", "_disable_adapters", "cast_input_dtype_enabled", "lora_variant", "scaling"}
_DROPOUT = nn.Dropout.forward if getattr(nn.Dropout.forward, "__globals__", None) is vars(dropouts) else None
# peft's lines for what the kernel computes, of plain layers and of quantised ones
_WRITTEN = ("result = result + lora_B(lora_A(dropout(x))) * scaling",)
_WRITTEN_OF_QUANTISED = ("output = lora_B(lora_A(dropout(x))) * scaling", "result = result + output")
_TOGETHER = "_kernels_ext_npu_together"  # attribute of gate's forward: computes gate and up, called by SwiGLU's MLPs


class _Layer(NamedTuple):
    """The tensors that the output of a layer with adapters is computed from."""

    weight: Any  # that of the frozen layer; None for a quantised one, which a call makes known to the kernel
    bias: Tensor | None
    # (a, b, scale, probability of dropout) of each active adapter; a dropout that is not plain stands there itself
    adapters: list[tuple[Tensor, Tensor, float, float | nn.Module]]
    quantised: nn.Module | None = None  # the frozen layer where it is quantised

    @property
    def has_one_that_keeps_all(self) -> bool:
        """Whether it has exactly one adapter, without dropout."""
        return len(self.adapters) == 1 and self.adapters[0][3] == 0


def find(view: View) -> list[Decision]:
    """Decide of every linear layer of a model, and of every one with adapters in place of what it adapts."""
    library: Any = sys.modules.get(_LIBRARY)
    adapting = {cls for cls in view.by_class if library is not None and issubclass(cls, library.LoraLayer)}
    is_sharded = bool(adapting) and any(issubclass(cls, FSDPModule) for cls in view.by_class)
    parts = {part for cls in adapting for module in view.by_class[cls] for part in module.modules()}
    linear = [cls for cls in view.by_class if issubclass(cls, nn.Linear)]
    compressed = compressed_linear.schemes(view)
    reasons: dict[type, Reason] = {cls: why_kept(cls) for cls in linear}
    found = []
    for path, module in view.instances((*adapting, *linear)):
        if type(module) in adapting:
            make: Any = functools.partial(_make_forward, type(module).forward)  # type: ignore[arg-type]
            reason, present = _refusal(module, is_sharded), NAME if forward_owner(module) == LORA else None
        elif module in parts or module in compressed or ("forward" in vars(module) and forward_owner(module)):
            continue
        else:
            make, present, reason = None, None, reasons[type(module)]
        found.append(Decision(path, module, None, reason, present, kind=PROJECTIONS, is_candidate=False, make=make))
    return found


def put(view: View, decisions: Iterable[Decision], swapping: Swapping) -> None:
    """Bind forwards to a model's layers with adapters, and let those of one input be computed together."""
    decisions = list(decisions)
    bind_forwards(LORA, view, decisions, swapping)
    linear_groups.put(view, {decision.module for decision in decisions if decision.reason is None})


def remarks(view: View, served: list[Decision]) -> dict[Decision, str]:
    """Say what is computed together with adapted layers, and why MLPs with two such layers multiply twice."""
    adapted = {decision.module: decision for decision in served if decision.present == NAME}
    found: dict[Decision, str] = {
        d: PAUSED for d in adapted.values() if _current_layer(d.module, is_sharded=True) is PAUSED
    }
    for _, parent in view.named if adapted else ():
        pair = gate_up_layout.called(parent)
        for group in linear_groups.shared_input_groups(parent) if pair is None else [pair]:
            if _current_layers(group, is_sharded=True) is not None:  # in a call FSDP2 has gathered them
                names = ", ".join(name for name, child in parent.named_children() if child in group)
                found |= {adapted[layer]: f"one node with {names}" for layer in group if layer in adapted}
    for decision in served if adapted else ():
        pair = gate_up_layout.called(decision.module) if decision.kind is MLPS else None
        if pair is not None and (apart := why_apart(*pair)) is not None:
            found[decision] = f"two products, since {apart}"
        elif pair is not None and all(forward_owner(e) == LORA and is_quantised(type(e.base_layer)) for e in pair):
            found[decision] = "gate and up are made into one weight by each product"
    return found


def why_apart(*pair: nn.Module) -> str | None:
    """Return why two layers with adapters that a kernel computes are two products; None if they need not be."""
    if any(forward_owner(each) != LORA for each in pair):
        return None
    layers = [layer for each in pair if isinstance(layer := _current_layer(each, is_sharded=True), _Layer)]
    if len(layers) < len(pair):
        return "peft computes what they are adapted by"
    if any(len(layer.adapters) != 1 for layer in layers):
        return "one of them has several adapters"
    if any(layer.bias is not None for layer in layers):
        return "they have biases beside adapters"
    if not all(layer.has_one_that_keeps_all for layer in layers):
        return "each adapter drops other elements of the input"
    if len({layer.adapters[0][2] for layer in layers}) > 1:
        return "their adapters differ in scale"
    return None


def _refusal(module: Any, is_sharded: bool) -> str | None:
    """Return why a layer with adapters is computed by its class; None if it need not be."""
    library: Any = sys.modules[_LIBRARY]
    if (reason := refusals.unwanted(module, REPOSITORY) or refusals.elsewhere(module)) is not None:
        return reason
    quantised = vars(sys.modules[_LIBRARY_OF_QUANTISED]) if _LIBRARY_OF_QUANTISED in sys.modules else {}
    is_plain = type(module) is library.Linear
    if not is_plain and type(module) not in (quantised.get("Linear4bit"), quantised.get("Linear8bitLt")):
        return f"it is a {qualified_name(type(module))}: the kernel is for peft's Linear"
    written = _WRITTEN if is_plain else _WRITTEN_OF_QUANTISED
    if not (_is_written(type(module).forward, written) and vars(module).keys() >= _MEMBERS):  # type: ignore[arg-type]
        return "this release of peft computes adapters in other words, or its forward was replaced"
    if "forward" in vars(module) and forward_owner(module) is None:
        return WRAPPED
    found = _current_layer(module, is_sharded)
    return found if isinstance(found, str) and found is not PAUSED else None


@functools.cache
def _is_written(forward: FunctionType, lines: tuple[str, ...]) -> bool:
    """Tell whether a forward of peft computes adapters by the lines that the kernel reproduces."""
    tree = function_tree(forward)  # none of one that somebody has wrapped
    assignments = [] if tree is None else [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    return {ast.unparse(node) for node in assignments} >= set(lines)


def _make_forward(matched: FunctionType) -> FunctionType:
    return _forward_with(registration.package(REPOSITORY), matched)


@functools.cache
def _forward_with(kernel: ModuleType, matched: FunctionType) -> FunctionType:
    """Return the forward of a layer with adapters, whose class computed what was matched.

    It is `forward` by name, as a pickle of a model knows it.
    """
    adapter = kernel.Adapter

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        is_plain = type(self).forward is matched and not args and not kwargs and _is_plain_call(x)
        layer = _current_layer(self) if is_plain else None
        if not isinstance(layer, _Layer):
            return class_forward(self, forward, matched)(self, x, *args, **kwargs)
        if (found := linear_groups.pop_cached(self, x)) is not None:
            return found
        if (layers := _current_layers(group := linear_groups.called_next(self))) is not None:
            first, *others = kernel.lora_linears(x, _given(layers, x, kernel))
            linear_groups.cache_outputs(x, group[1:], others)
            return first
        given = [
            adapter(a, b, scale, dropout(self._cast_input_dtype(x, a.dtype)))
            if isinstance(dropout, nn.Module)
            else adapter(a, b, scale, None, dropout)
            for a, b, scale, dropout in layer.adapters
        ]
        weight, bias = _frozen(layer, x, kernel)
        return kernel.lora_linear(x, weight, bias, given)

    def together(gate: Any, up: Any, x: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """Compute gate and up of an MLP as one product, or as two; None where they have to be called."""
        are_plain = type(gate).forward is type(up).forward is matched and _is_plain_call(x)
        layers = _current_layers([gate, up]) if are_plain else None
        if layers is None:
            return None
        given = _given(layers, x, kernel)
        both = kernel.lora_pair(x, given)
        return (both, None) if both is not None else kernel.lora_linears(x, given)

    setattr(forward, _TOGETHER, together)
    return forward  # type: ignore[return-value]


def _is_plain_call(x: Tensor) -> bool:
    return x.device.type == "npu" and not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())


def _current_layers(modules: Sequence[nn.Module], is_sharded: bool = False) -> list[_Layer] | None:
    """Return the tensors of several layers that can be computed together; None where each has to be called.

    With dropout each has to be: every adapter drops other elements, and hardly anything is shared.
    """
    if len(modules) < 2 or any(forward_owner(module) != LORA or has_hooks(module) for module in modules):
        return None
    layers = [_current_layer(module, is_sharded) for module in modules]
    found = [layer for layer in layers if isinstance(layer, _Layer) and layer.has_one_that_keeps_all]
    return found if len(found) == len(modules) else None


def _given(layers: Sequence[_Layer], x: Tensor, kernel: ModuleType) -> list[tuple[Any, Tensor | None, Any]]:
    """Return layers with one adapter each as the kernel takes them."""
    return [(*_frozen(layer, x, kernel), kernel.Adapter(*layer.adapters[0][:3])) for layer in layers]


def _frozen(layer: _Layer, x: Tensor, kernel: ModuleType) -> tuple[Any, Tensor | None]:
    """Return the weight and bias of the frozen layer as the kernel takes them."""
    if layer.quantised is None:
        return layer.weight, layer.bias
    from kernels_ext_npu.bitsandbytes_backend import layers  # models in 16 bits do without

    weight = layers.weight(layer.quantised, x.dtype, kernel)
    return weight, None if layer.bias is None else layer.bias.to(weight.dtype)


def _why_not_made(base: Any, is_sharded: bool) -> str | None:
    """Return why a kernel cannot make the weight of a quantised layer; None if it can."""
    from kernels_ext_npu.bitsandbytes_backend import layers  # models in 16 bits do without

    is_wrapped = "forward" in vars(base) and forward_owner(base) is None
    return WRAPPED if is_wrapped else layers.why_not_made(base, is_sharded)


def _current_layer(module: Any, is_sharded: bool = False) -> _Layer | str:
    """Return the tensors that a layer is computed from now, or the reason why its class has to compute it."""
    modules, members = module._modules, vars(module)
    base = modules["base_layer"]
    is_made = is_quantised(type(base))
    reason = _why_not_made(base, is_sharded) if is_made else why_not_plain(base, is_sharded)
    if reason is not None:
        return f"of the layer that it adapts: {reason}"
    if members["merged_adapters"] or members["_disable_adapters"]:
        return PAUSED
    weight = base._parameters["weight"]
    if weight.requires_grad and not is_made:
        return "the layer that it adapts is trained, too"
    if not members["cast_input_dtype_enabled"]:
        return "peft was told not to cast what it adapts"
    adapters: list[Any] = []
    for name in module.active_adapters:
        if name not in modules["lora_A"]._modules:
            continue
        if (other := members["lora_variant"].get(name)) is not None:
            return f"its adapter {name} is of another kind: {type(other).__name__}"
        factors = [modules[side]._modules[name] for side in ("lora_A", "lora_B")]
        if (reason := next(filter(None, (why_not_plain(factor, is_sharded) for factor in factors)), None)) is not None:
            return f"of its adapter {name}: {reason}"
        if any(factor._parameters["bias"] is not None for factor in factors):
            return f"its adapter {name} has a bias"
        (a, b), scale = (factor._parameters["weight"] for factor in factors), members["scaling"][name]
        if a.dtype is not b.dtype or (a.dtype not in (weight.dtype, torch.float32) and not is_made):
            return f"its adapter {name} is in {a.dtype} and {b.dtype}, and its weight in {weight.dtype}"
        if not isinstance(scale, (int, float)):
            return f"the scale of its adapter {name} is a {type(scale).__name__}"
        adapters.append((a, b, scale, _dropout(modules["lora_dropout"]._modules[name])))
    if not adapters:
        return PAUSED
    return _Layer(None if is_made else weight, base._parameters["bias"], adapters, base if is_made else None)


def _dropout(module: nn.Module) -> float | nn.Module:
    """Return the probability of a plain dropout; the module itself if it is not plain."""
    if has_hooks(module) or "forward" in vars(module):
        return module
    if type(module) is nn.Identity:
        return 0.0
    is_torchs = nn.Dropout.forward is _DROPOUT and nn.Dropout.__call__ is TORCH_CALL
    if type(module) is not nn.Dropout or not is_torchs or module.inplace or module.p >= 1:
        return module
    return module.p if module.training else 0.0


FINDER = Finder("linear layers", find, put, remarks=remarks)
