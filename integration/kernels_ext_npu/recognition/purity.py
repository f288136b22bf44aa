"""Whether a forward is a pure function of its arguments and settings, as far as its code tells without being run.

A kernel in its place would leave out what else it does, and would not see what it reads elsewhere.
"""

from __future__ import annotations

import functools
from itertools import pairwise
from logging import Logger
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from kernels_ext_npu.recognition.function_settings import reached_functions
from kernels_ext_npu.recognition.module_settings import is_config, is_plain
from kernels_ext_npu.syntax.source_tree import code_names, instructions, written_globals
from kernels_ext_npu.transformers_internals import is_kernel_function

_CODE = (
    *(FunctionType, BuiltinFunctionType, ModuleType, type, functools.partial, type(code_names), Logger),
    *(torch.jit.ScriptFunction, torch._ops.OpOverload, torch._ops.OpOverloadPacket),
)
_LIBRARIES = ("torch.", "transformers.", "einops", "triton.", "typing")  # whose objects are what they are
_SEEDS = {"manual_seed", "set_rng_state"}


@functools.cache
def impurity(cls: type[nn.Module], _: Any) -> str | None:
    """Say what a class with this forward does beside computing, or reads beside its settings; None if nothing.

    Files of helpers may have objects that are constants to them; that of the class has what may be told something.
    """
    own_files = {base.__module__ for base in cls.__mro__}
    for function in reached_functions(cls.forward, cls, _LIBRARIES):
        if written := written_globals(function.__code__):
            return f"it writes {written[0]} of its file"
        if (name := _written_elsewhere(function)) is not None:
            return f"it sets {name} of something else"
        if not _SEEDS.isdisjoint(code_names(function.__code__)):
            return "it seeds what draws random numbers"
        for step in instructions(function.__code__) if function.__module__ in own_files else ():
            if step.opname == "LOAD_GLOBAL" and not _is_constant(function.__globals__.get(step.argval)):
                return f"it reads {step.argval} of its file, an object that may change"
    return None


def _written_elsewhere(function: FunctionType) -> str | None:
    """Return an attribute that a function sets of something else than its first argument; None if it sets none."""
    own = function.__code__.co_varnames[:1]
    for before, step in pairwise(instructions(function.__code__)):
        # after SWAP it has been read, too, as a run shows
        last = before.argval[-1:] if type(before.argval) is tuple else (before.argval,)
        if step.opname == "STORE_ATTR" and before.opname != "SWAP" and last != own:
            return str(step.argval)
    return None


def _is_constant(value: Any) -> bool:
    """Tell whether a global is code or a constant: configurations are watched."""
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    if isinstance(value, _CODE) or is_plain(value) or is_config(value) or is_kernel_function(value):
        return True
    return type(value).__module__.startswith(_LIBRARIES) and not isinstance(value, torch.Tensor)
