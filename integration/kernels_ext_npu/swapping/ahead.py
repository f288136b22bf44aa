"""What is computed for layers before they are called: those that a module calls with one input, at the first of them.

The first call of such layers computes all of them as one node of autograd, and the others, which follow in the same
forward with the very same tensor, are handed what was computed for them. Whatever is not as expected then is computed
by itself.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Collection, Sequence
from types import CodeType
from typing import NamedTuple

from torch import Tensor, nn
from torch._subclasses import FakeTensor

from kernels_ext_npu.swapping import loaded
from kernels_ext_npu.swapping.draws import Draw
from kernels_ext_npu.swapping.forwards import kernel_forward
from kernels_ext_npu.swapping.siblings import siblings_in

_FRAMES = 8  # of calls between the forward of a module and that of its layer


class _Group(NamedTuple):
    """Layers that one module calls with one input, the first of them first.

    Attributes:
        parent: the module.
        names: of the layers in it.
        members: the layers.
        caller: the code that calls them.
        kernel: the name of the kernel's layer that it is of; None if it is of the class of the module.
    """

    parent: weakref.ref[nn.Module]
    names: tuple[str, ...]
    members: tuple[weakref.ref[nn.Module], ...]
    caller: CodeType
    kernel: str | None


class _State(NamedTuple):
    """A tensor as it was: which one, how often it had been changed, and where it lay."""

    tensor: Tensor
    version: int
    address: int


class _Output(NamedTuple):
    """What was computed for a layer: of what beside its input, with which random numbers, and the output."""

    of: list[_State]
    draw: Draw | None
    output: Tensor


class _Computed(NamedTuple):
    """What was computed for layers that have not been called yet, and of what."""

    x: _State
    outputs: dict[nn.Module, _Output]


class _Ahead(threading.local):
    """What this thread has computed for layers that are called next."""

    computed: _Computed | None = None


_ahead = _Ahead()
_groups: weakref.WeakKeyDictionary[nn.Module, _Group] = weakref.WeakKeyDictionary()  # by their first layers


def note(model: nn.Module, served: Collection[nn.Module]) -> None:
    """Note which layers of a model are called with one input, where all of them are served alike.

    What calls them is the forward that computes their module: where that is a kernel's, it does what the class does.
    """
    for parent in model.modules():
        kernel = kernel_forward(parent)
        layer = None if kernel is None else loaded.layer_name(kernel)
        for names, caller in siblings_in(parent):
            members = [parent._modules.get(name) for name in names]
            if len(set(members)) == len(names) and all(member in served for member in members):
                references = tuple([weakref.ref(member) for member in members if member is not None])
                group = _Group(weakref.ref(parent), names, references, (kernel or caller).__code__, layer)
                _groups[members[0]] = group  # type: ignore[index]


def forget(module: nn.Module) -> None:
    """Let no layer be computed when this one is called."""
    _groups.pop(module, None)


def members_of(module: nn.Module) -> list[nn.Module]:
    """Return the layers that may be computed when this one is called; none where there are no others.

    Nor where somebody has put another one in the place of one of them since.
    """
    group = _groups.get(module)
    parent = None if group is None else group.parent()
    if group is None or parent is None:
        return []
    children = parent._modules
    members = [member() for member in group.members]
    if any(member is None or children.get(name) is not member for name, member in zip(group.names, members)):
        return []
    return members  # type: ignore[return-value]


def caller_of(module: nn.Module) -> str | None:
    """Return the name of the kernel's layer that calls a layer first of several; None if none does."""
    group = _groups.get(module)
    return None if group is None else group.kernel


def called_next(module: nn.Module) -> list[nn.Module]:
    """Return the layers that the caller of one is going to call with its input, that one first; none if it is alone.

    It is for the forward of a layer: the calls that have led to that are looked at.
    """
    group = _groups.get(module)
    if group is None:
        return []
    frame = sys._getframe(2)
    for _ in range(_FRAMES):
        if frame is None or frame.f_code is group.caller:  # type: ignore[redundant-expr]
            break
        frame = frame.f_back  # type: ignore[assignment]
    return members_of(module) if frame is not None and frame.f_code is group.caller else []


def keep(
    x: Tensor,
    members: Sequence[nn.Module],
    of: Sequence[Sequence[Tensor]],
    outputs: Sequence[Tensor],
    draws: Sequence[Draw | None] | None = None,
) -> None:
    """Keep what was computed for layers, until they are called or something else is kept.

    Args:
        x: their input.
        members: the layers.
        of: for each of them the tensors that it was computed of, beside the input.
        outputs: what was computed.
        draws: what was drawn for each of them; by default nothing.
    """
    draws = [None] * len(members) if draws is None else draws
    kept = {
        member: _Output([_state(tensor) for tensor in tensors], draw, output)
        for member, tensors, output, draw in zip(members, of, outputs, draws, strict=True)
    }
    _ahead.computed = _Computed(_state(x), kept)


def handed_out(module: nn.Module, x: Tensor, of: Sequence[Tensor]) -> Tensor | None:
    """Return what was computed for a layer; None where nothing was, or where it is called with something else now."""
    computed = _ahead.computed
    if computed is None or computed.x.tensor is not x or module not in computed.outputs:
        return None
    states, draw, output = computed.outputs.pop(module)
    if not computed.outputs:
        _ahead.computed = None
    is_as_then = _is_as_then(computed.x, x) and len(states) == len(of) and all(map(_is_as_then, states, of))
    return output if is_as_then and (draw is None or draw.take()) else None


def _state(tensor: Tensor) -> _State:
    return _State(tensor, _version(tensor), _address(tensor))


def _is_as_then(state: _State, tensor: Tensor) -> bool:
    then, version, address = state
    return then is tensor and version == _version(tensor) and address == _address(tensor)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _address(tensor: Tensor) -> int:
    return 0 if type(tensor) is FakeTensor else tensor.data_ptr()
