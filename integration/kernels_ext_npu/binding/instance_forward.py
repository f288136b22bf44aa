"""Forwards of ours that modules get one by one, whatever their class: put in, and taken out."""

from __future__ import annotations

from types import FunctionType, MethodType

from torch import nn

from kernels_ext_npu.binding.loaded_kernels import marked, owner_of


def put(module: nn.Module, forward: FunctionType, owner: str) -> None:
    """Give a module a forward, marked with whose it is, unless it has one of that owner."""
    if owner_of(module) != owner:
        module.forward = MethodType(marked(forward, owner), module)  # type: ignore[method-assign]


def take_out(module: nn.Module, owner: str) -> None:
    """Give a module the forward of its class, if it has one of an owner."""
    if owner_of(module) == owner:
        del module.forward
