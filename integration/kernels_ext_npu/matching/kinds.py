"""What a class or function of transformers is, which decides the kernel that it is counted for."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from types import CodeType, FunctionType

from torch import nn

from kernels_ext_npu.catalogue import LAYERS
from kernels_ext_npu.matching.lookup import find_function_reference, find_reference, original_function

COUNTED = "5.22.2"  # the release of transformers that kept.json is about
# kind -> reason -> names; functions as "file:name", methods as "file:Class.name"
KEPT: dict[str, dict[str, list[str]]] = json.loads(Path(__file__).with_name("kept.json").read_text())
NORMS, MLPS, ROTARY, TABLES, EXPERTS, ROUTERS = KEPT
# kernel -> what is counted for it
KERNELS = {"RMSNorm": (NORMS,), "SwiGLU": (MLPS,), "RoPE": (ROTARY, TABLES), "FusedMoE": (EXPERTS, ROUTERS)}
UNKNOWN = "computes something else, which nobody has looked at yet"

_OF_REFERENCE = {
    "RMSNorm": NORMS,
    "SwiGLU": MLPS,
    "RotaryEmbedding": TABLES,
    "FusedMoE": EXPERTS,
    "Router": ROUTERS,
}
_MLP_NAMES = re.compile(r"MLP|Mlp|FFN|FeedForward|GatedActDense|SwiGLU|GLU|SharedExpert")
_ROUTER_NAMES = re.compile("Router$|(Expert|MoE|Moe|TopK).*(Gate|Gating)$|MoEV1Gate$")
_EXPERTS_NAMES = re.compile("Experts$|NaiveMoe$")
_TABLE_NAMES = re.compile(r"(Rotary|RoPE|Rope)\w*Embedding$|LightGluePositionalEncoder$")
_METHOD_NAMES = re.compile(r"_?apply_\w*(rotary|rope)")
_HELPERS = ("rotate_half", "rotate_every_two", "rotate_pairwise")


def of_class(cls: type[nn.Module]) -> str | None:
    """Its kind: by what it computes where a kernel serves it, and otherwise by its name.

    What is called an MLP also has to have a gate in its forward.
    """
    reference, name = find_reference(cls), cls.__name__
    if reference is not None:
        return _OF_REFERENCE.get(reference.kind or reference.repository)
    if LAYERS.get(getattr(cls, "kernel_layer_name", ""), "") == "RMSNorm" or "rmsnorm" in name.lower():
        return NORMS
    if _TABLE_NAMES.search(name):
        return TABLES
    if _ROUTER_NAMES.search(name):
        return ROUTERS
    if _MLP_NAMES.search(name) and _looks_gated(cls):
        return MLPS
    return EXPERTS if _EXPERTS_NAMES.search(name) else None


def is_rotary(name: str, function: object) -> bool:
    """Whether a function of a modeling file rotates queries and keys: by what it computes or by what it was decorated
    for, by its name, or because it calls a helper that rotates.

    Args:
        name: what the file calls it.
        function: the function, or what `kernels` made of it.
    """
    if find_function_reference(function) is not None or "rotary" in getattr(type(function), "kernel_layer_name", ""):
        return True
    original = original_function(function)
    if original is None or name.startswith(_HELPERS):  # helpers are part of what calls them
        return False
    if any(word in name for word in ("rotary", "rope", "rotate")):
        return True
    return any(callee.startswith("rotate") for callee in names(original))


def names(function: FunctionType | None) -> set[str]:
    """The attributes and global names that a function uses."""
    return _names(function.__code__) if function else set()


def rotary_methods(cls: type[nn.Module]) -> list[str]:
    """The methods of a class itself that rotate, by their names. `kernels` has no way to replace them."""
    named = {name: value for name, value in vars(cls).items() if _METHOD_NAMES.match(name)}
    return [name for name, value in named.items() if isinstance(value, (FunctionType, staticmethod))]


def reason(kind: str, name: str) -> str:
    """Why no kernel serves what is called so."""
    return next((why for why, names in KEPT[kind].items() if name in names), UNKNOWN)


def _looks_gated(cls: type[nn.Module]) -> bool:
    try:
        source = inspect.getsource(cls.forward)
    except (OSError, TypeError):
        return False
    return bool(re.search(r"act|silu|gelu|swish", source)) and " * " in source


def _names(code: CodeType) -> set[str]:
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)
