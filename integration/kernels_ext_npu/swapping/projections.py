"""Linear layers that get gradients of their weights as the weights lie, so that autograd copies none of them.

A model keeps its modules; each plain ``nn.Linear`` gets a forward that computes what its class computes, and that asks
the kernel where a gradient of its weight is needed. Layers that a module calls with one input (siblings.py) are one node
of autograd: the first call computes all of them, and the others, which follow in the same forward with the very same
tensor, are handed what was computed for them. Whatever is not as expected there is computed by itself.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from kernels_ext_npu import sources
from kernels_ext_npu.catalogue import MLPS
from kernels_ext_npu.references.hooks import has_hooks
from kernels_ext_npu.swapping import experts, heads, loaded, packing, refusals, state
from kernels_ext_npu.swapping.devices import is_elsewhere
from kernels_ext_npu.swapping.forwards import kernel_forward
from kernels_ext_npu.swapping.siblings import siblings_in

REPOSITORY = "Linear"
NAME = "linear"
OF_A_KERNEL = "it is part of what another kernel serves: "
_PLAIN = (nn.Parameter, FakeTensor)
_FORWARD = nn.Linear.forward
_FRAMES = 6  # of calls between the forward of a module and that of its layer


class _Group(NamedTuple):
    """Layers that one module calls with one input, the first of them first, and the code that calls them."""

    members: tuple[weakref.ref[nn.Module], ...]
    caller: CodeType


class _Computed(NamedTuple):
    """What was computed for layers that have not been called yet.

    Attributes:
        x: the input.
        version: how often it had been changed.
        outputs: for each layer its weight, how often that had been changed, where it lay, and the output.
    """

    x: Tensor
    version: int
    outputs: dict[nn.Module, tuple[Tensor, int, int, Tensor]]


class _Ahead(threading.local):
    """What this thread has computed for layers that are called next."""

    computed: _Computed | None = None


_ahead = _Ahead()
_groups: weakref.WeakKeyDictionary[nn.Module, _Group] = weakref.WeakKeyDictionary()  # by their first layers


def take(model: nn.Module) -> None:
    """Give the linear layers of a model the kernel's forward, where nothing speaks against it, and the others not."""
    served = set()
    for _, module, reason in projections_of(model):
        if reason is not None:
            take_out(module)
            continue
        served.add(module)
        if not is_swapped(module):
            module.forward = MethodType(_forward_with(_kernel()), module)  # type: ignore[method-assign]
    for parent in model.modules():
        for names, caller in siblings_in(parent):
            members = [parent._modules.get(name) for name in names]
            if len(set(members)) == len(names) and served.issuperset(members):
                _groups[members[0]] = _Group(tuple(map(weakref.ref, members)), caller.__code__)  # type: ignore


def restore(model: nn.Module) -> None:
    """Give all linear layers of a model the forward of their class."""
    for module in model.modules():
        take_out(module)


def take_out(module: nn.Module) -> None:
    """Give a module the forward of its class, if it is a linear layer that has the kernel's."""
    if is_swapped(module):
        del module.forward
        _groups.pop(module, None)


def is_swapped(module: nn.Module) -> bool:
    """Tell whether a module is a linear layer that has the kernel's forward."""
    forward = vars(module).get("forward")
    return isinstance(forward, MethodType) and getattr(forward.__func__, "__module__", None) == __name__


def together(model: nn.Module) -> dict[nn.Module, str]:
    """Return the layers of a model that are one node with others, each with the names of all of these."""
    names = {module: path.rpartition(".")[2] for path, module in model.named_modules()}
    found = {}
    for module in names:
        if is_swapped(module) and (group := _groups.get(module)) is not None:
            members = [member() for member in group.members]
            found |= dict.fromkeys(filter(None, members), ", ".join(names.get(m, "") for m in members if m is not None))
    return found


def projections_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, str | None]]:
    """Find the linear layers of a model, each with its path and why it keeps its forward; None if it need not."""
    others = _of_kernels(model)
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
        return f"it is a {_name_of(type(module))}, which may compute something else"
    if nn.Linear.forward is not _FORWARD:
        return "the forward of all linear layers was replaced"
    if is_elsewhere(module):
        return refusals.elsewhere(module)
    if "forward" in vars(module) and not is_swapped(module):
        return "another library has wrapped its forward"
    if has_hooks(module):
        return "hooks watch its calls"
    weight = module._parameters.get("weight")
    if weight is None or hasattr(weight, "_fsdp_flattened"):
        return "its weight is a part of another tensor, as under FSDP1"
    if type(weight) not in _PLAIN and not (is_sharded and isinstance(weight, DTensor)):
        return f"its weight is a {_name_of(type(weight))}: the kernel multiplies with numbers alone"
    return None


@functools.cache
def _forward_with(kernel: ModuleType) -> FunctionType:
    """Return the forward of a linear layer, for a kernel: `forward` by name, as a pickle of a model knows it."""
    linear = kernel.linear

    def forward(self: nn.Linear, input: Tensor) -> Tensor:
        if torch.is_grad_enabled() and type(self) is nn.Linear and nn.Linear.forward is _FORWARD:
            parameters = self._parameters
            weight = parameters.get("weight")
            if type(weight) in _PLAIN and weight.requires_grad and not torch.compiler.is_compiling():  # type: ignore
                if _ahead.computed is not None and (found := _handed_out(self, weight, input)) is not None:
                    return found
                if self in _groups and (found := _computed_together(self, input, kernel)) is not None:
                    return found
                return linear(input, weight, parameters["bias"])
        return type(self).forward(self, input)

    return forward  # type: ignore[return-value]


def _handed_out(module: nn.Module, weight: Any, x: Tensor) -> Tensor | None:
    """Return what was computed for a layer, unless it is called with something else now."""
    computed = _ahead.computed
    assert computed is not None
    if computed.x is not x:
        return None
    weight_then, version, address, output = computed.outputs.pop(module, (None, 0, 0, None))
    if not computed.outputs:
        _ahead.computed = None
    is_as_then = weight_then is weight and version == weight._version and computed.version == x._version
    return output if is_as_then and address == _address(weight) else None


def _computed_together(module: nn.Module, x: Tensor, kernel: ModuleType) -> Tensor | None:
    """Compute a layer and those that are called next with the same input; None if that cannot be."""
    group = _groups[module]
    members = [member() for member in group.members]
    if torch.is_inference(x) or not all([_is_trained(member) for member in members]):
        return None
    if not _is_called_by(group.caller, sys._getframe(2)):
        return None
    weights = [member._parameters["weight"] for member in members]  # type: ignore[union-attr]
    biases = [member._parameters["bias"] for member in members]  # type: ignore[union-attr]
    first, *others = kernel.linears(x, weights, biases)
    notes = [(weight, weight._version, _address(weight)) for weight in weights[1:]]  # type: ignore[union-attr]
    outputs = {member: (*note, output) for member, note, output in zip(members[1:], notes, others)}
    _ahead.computed = _Computed(x, x._version, outputs)  # type: ignore[arg-type]
    return first


def _is_trained(module: nn.Module | None) -> bool:
    """Tell whether a layer is a plain one now that needs a gradient of its weight, and that nobody watches."""
    if module is None or type(module) is not nn.Linear or not is_swapped(module) or has_hooks(module):
        return False
    weight = module._parameters.get("weight")
    return type(weight) in _PLAIN and weight.requires_grad and not weight.is_meta  # type: ignore[union-attr]


def _is_called_by(code: CodeType, frame: Any) -> bool:
    """Tell whether the forward with this code is what has called a layer: it calls the others next."""
    for _ in range(_FRAMES):
        if frame is None:
            return False
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def _address(weight: Tensor) -> int:
    return 0 if type(weight) is FakeTensor else weight.data_ptr()


def _of_kernels(model: nn.Module) -> dict[nn.Module, str]:
    """Return the linear layers whose weights a kernel for what they are part of reads, each with the reason to keep it.

    An MLP whose gate and up are one layer calls its layers, and they are no less plain in it.
    """
    found: dict[nn.Module, str] = {}
    for module in model.modules():
        forward = kernel_forward(module)
        if forward is None and not experts.is_called_by_name(module):
            continue
        layer = loaded.layer_name(forward) if forward is not None else type(module).__name__
        if layer is None or (layer in MLPS.layers and layer not in packing.WITH_GATE_AND_UP):
            continue
        for child in module.modules():
            if isinstance(child, nn.Linear):
                found[child] = f"{OF_A_KERNEL}{layer}"
    return found


def _name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _kernel() -> ModuleType:
    assert state.current is not None
    if state.current.linear_kernel is None:
        state.current.linear_kernel = sources.load_package(state.current.source, REPOSITORY)
    return state.current.linear_kernel
