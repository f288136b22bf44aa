"""What modules of other people's code compute, such as norms and routers: no spelling and no name counts.

A forward runs on small random numbers on the CPU, on a stand-in that shares nothing with the module but its settings.
Two witnesses have to agree. What it calls: a few operators of torch, without a host read, a branch on a size, a draw of
random numbers or a write. And what comes out: in float64, at magnitudes at which eps and clamps show, what the formula
gives, where straight lines of such operators that agree are the same function; then in 16 bits and mixed dtypes, where
the roundings of norms tell layers apart. What it was read from is kept beside it: other settings are another question.
"""

from __future__ import annotations

import functools
from itertools import islice
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from kernels_ext_npu.recognition.activations import find_activation
from kernels_ext_npu.recognition.computed import NotRecognised, OwnOperatorError, Recognised
from kernels_ext_npu.recognition.mlps.finder import find_gated_mlp
from kernels_ext_npu.recognition.module_settings import names_read, opaque_children, read_settings, unknown_member
from kernels_ext_npu.recognition.moe_blocks.finder import find_moe_block
from kernels_ext_npu.recognition.norms.finder import find_norm
from kernels_ext_npu.recognition.purity import impurity
from kernels_ext_npu.recognition.rotations.modules import find_rotating_module, held_tensors, read_helpers, tensor_names
from kernels_ext_npu.recognition.rotations.tables import find_rotary_table
from kernels_ext_npu.recognition.routers.finder import find_router
from kernels_ext_npu.recognition.watched_runs import attempt, isolated

_known: dict[Any, Recognised | NotRecognised | None] = {}


def recognise(module: nn.Module) -> Recognised | NotRecognised | None:
    """Return what a module computes, or what it does that no layer computes; None if it looks like nothing of these."""
    held = (*module._parameters.values(), *module._buffers.values())
    if any(each is not None and is_lazy(each) for each in held):
        return None  # has no shape yet
    tensors = tensor_names(module)
    buffers = tuple(name for name, each in module._buffers.items() if each is not None and name not in tensors)
    settings = read_settings(module, tensors or buffers)
    if "npu" in names_read(type(module), type(module).forward):  # type: ignore[arg-type]
        return None  # what it computes on an NPU is seen on none
    if settings is None:
        member = unknown_member(module, tensors or buffers)
        return None if member is None else NotRecognised(f"it reads self.{member}, no number, text or function")
    opaque = tuple((path, type(child)) for path, child in opaque_children(module).items())
    shapes = tuple((name, None if p is None else p.shape) for name, p in module._parameters.items())
    tables = tuple((name, each.shape, each.dtype) for name, each in zip(tensors, held_tensors(module, tensors)))
    helpers = read_helpers(type(module), tensors)
    read = None if helpers is None else tuple((name, value) for _, name, value in helpers)
    lists = _in_blocks(module)
    key = settings, opaque, shapes, tables, read, lists
    if key not in _known:
        rotating = () if helpers is None else (functools.partial(find_rotating_module, helpers),)
        block = (functools.partial(find_moe_block, recognise, settings),) if lists else ()
        finders: tuple[Any, ...] = find_norm, find_activation, find_gated_mlp, find_router, *rotating
        if tensors:
            finders = find_rotary_table, *rotating
        elif buffers:
            finders = find_router, *block
        elif opaque:
            finders = find_gated_mlp, find_router, *block
        impure = impurity(type(module), type(module).forward)  # type: ignore[arg-type]
        if impure is not None:
            finders = block  # which says so of one that it is nearest to
        seen = [NotRecognised(impure)] if impure is not None else []
        try:
            with isolated():
                found = next(filter(None, (attempt(find, module, seen=seen) for find in finders)), None)
            _known[key] = next(iter(seen), None) if found is None else Recognised(found, settings)
        except OwnOperatorError as error:
            _known[key] = NotRecognised(str(error), calls_operator=True)
    return _known[key]


def _in_blocks(module: nn.Module) -> tuple[Any, ...]:
    """Return what a module with a list of modules is known by: the first of the list, and what is beside it."""
    lists = {name: child for name, child in module._modules.items() if isinstance(child, nn.ModuleList)}
    firsts = {name: each for name, child in lists.items() for each in islice(child.children(), 1)}
    if not firsts:
        return ()
    types = {name: frozenset(map(type, lists[name])) for name in firsts}
    first = tuple((name, len(lists[name]), types[name], read_settings(each)) for name, each in firsts.items())
    others = {name: child for name, child in module._modules.items() if child is not None and name not in lists}
    beside = tuple(
        (name, read_settings(child, tuple(name for name, _ in child.named_buffers(recurse=False))))
        for name, child in others.items()
    )
    return first, beside
