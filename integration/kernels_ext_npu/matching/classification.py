"""Classify classes, modules and functions of transformers into the kinds of the catalogue.

One classifier for the coverage, which sees classes, and for the report of a model, which sees modules.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from itertools import pairwise
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from kernels_ext_npu import catalogue
from kernels_ext_npu.catalogue import KIND_OF_LAYER, Kind
from kernels_ext_npu.matching.fingerprint import computes_as
from kernels_ext_npu.matching.lookup import find_pattern
from kernels_ext_npu.module_state import written_class
from kernels_ext_npu.reasons import Reason
from kernels_ext_npu.syntax.indexers import indexer_rewriter
from kernels_ext_npu.syntax.source_tree import code_names, function_tree, instructions
from kernels_ext_npu.transformers_internals import is_kernel_function, original_function

COUNTED = "5.24.0"  # the newest release of transformers that is supported, which unsupported.json is about
LIBRARIES = ("torch.", "transformers.")  # whose classes and functions are no other people's code
# the codes of reasons why no kernel serves a class that looks like one of a kind
CODES = ("device limit", "no operator", "needs a value on the host", "changes semantics", "unknown")


def _reason(code: str, text: str) -> Reason:
    return Reason(code, f"{code}: {text}")


UNNAMED = _reason("changes semantics", "it does not call its attention by a name, in whose place another could be put")
BIASED = _reason("no operator", "biases of positions are added to scores")
UNKNOWN = Reason("unknown", "is not in the release that unsupported.json is about")
# kind -> name -> reason; functions and attention as "file:name", methods as "file:Class.name"
UNSUPPORTED = {
    kind: {name: _reason(code, text) for code, texts in codes.items() for text in texts for name in texts[text]}
    for kind, codes in json.loads(Path(__file__).with_name("unsupported.json").read_text()).items()
}

_NAMES = {
    catalogue.TABLES: re.compile(r"(Rotary|RoPE|Rope)\w*Embedding$|LightGluePositionalEncoder$"),
    catalogue.ROUTERS: re.compile("Router$|(Expert|MoE|Moe|TopK).*(Gate|Gating)$|MoEV1Gate$"),
    catalogue.MLPS: re.compile(r"MLP|Mlp|FFN|FeedForward|GatedActDense|SwiGLU|GLU|SharedExpert"),
    catalogue.EXPERTS: re.compile("Experts$|NaiveMoe$"),
    catalogue.HYPER_CONNECTIONS: re.compile("Hyper(Connection|Head)$"),
    catalogue.INDEXERS: re.compile("Indexer(Scorer)?$"),
    catalogue.COMPRESSORS: re.compile("Compressor$"),
    catalogue.FORGET_GATES: re.compile("ForgetGate$"),
}
_ROUTING_NAMES = re.compile("Gate$|Gating$")  # routers, if they have a top_k
# blocks of other people's code that send tokens to experts, if they hold these and no child is called so
BLOCK_NAMES = re.compile(r"M(oE|OE|oe)(Block|Layer|FeedForward|FFN|MLP)?$")
_ACTIVATIONS_FILE = "transformers.activations"  # most of these are one launch: counted is what takes several
_ACTIVATIONS = re.compile(r"act|silu|gelu|swish")
_METHOD_NAMES = re.compile(r"_?apply_\w*(rotary|rope)")
ROTATING_NAMES = re.compile(r"rotary|rope|rotate|(^|_)rot\d*(_|$)")
# helpers of rotary functions: no model calls them
HELPERS = ("rotate_half", "rotate_every_two", "rotate_pairwise")
# what transformers calls the functions of linear attention and state space models in its table of kernels
_LINEAR_NAMES = re.compile(r"(causal_conv1d|mamba|selective)_\w+|(chunk|fused_recurrent)_(gated_delta_rule|kda)")
_ATTENTION_BY_NAME = {"ALL_ATTENTION_FUNCTIONS", "_attn_implementation"}
_ATTENTION_NAMES = re.compile("Attention")
_OTHER_ATTENTION = re.compile("Deformable|Pooling|GRU|AttentionMap|InvariantPoint")  # no queries over keys
_TORCHS_ATTENTION = ("scaled_dot_product_attention", "varlen_attn")  # functions of attention that the kernel computes
_SOFTMAX = {"softmax", *_TORCHS_ATTENTION}
# the projections of gated MLPs, as transformers names them
_GATED = (
    {"gate_proj", "up_proj"},
    {"gate_up_proj", "down_proj"},
    {"w1", "w2", "w3"},
    {"wi_0", "wi_1"},
    {"input_linear", "output_linear"},
)
PROJECTIONS = frozenset().union(*_GATED)


def classify_class(cls: type[nn.Module]) -> Kind | None:
    """Return the kind of a class: by its pattern, if it has one, otherwise by its mark and its name.

    A class that is called an MLP counts only with a gate in its forward. Convolutions have a kind by instance only.
    """
    pattern, name = find_pattern(cls), cls.__name__
    if pattern is not None:
        return None if pattern.kind is catalogue.PATCHES else pattern.kind
    if (kind := KIND_OF_LAYER.get(getattr(cls, "kernel_layer_name", ""))) is not None:
        return kind
    if "rmsnorm" in name.lower():
        return catalogue.NORMS
    if cls.__module__ == _ACTIVATIONS_FILE and reason(catalogue.ACTIVATIONS, name) != UNKNOWN:
        return catalogue.ACTIVATIONS
    for kind, called in _NAMES.items():
        if called.search(name) and (kind is not catalogue.MLPS or _looks_gated(cls)):
            return kind
    return catalogue.ATTENTION if attends(cls) else None


def classify_instance(module: nn.Module) -> Kind | None:
    """Return the kind of a module whose class has none, by what its submodules show.

    Norms of any other sort count among the norms, so that every module called one is in the report.
    """
    pattern, name = find_pattern(type(module)), type(module).__name__
    if pattern is not None and pattern.kind is catalogue.PATCHES and module.stride == module.kernel_size:
        return catalogue.PATCHES
    if "norm" in name.lower() and not any(module.children()):
        return catalogue.NORMS
    if _ROUTING_NAMES.search(name) and hasattr(module, "top_k"):
        return catalogue.ROUTERS
    if BLOCK_NAMES.search(name) and is_others(type(module)) and _holds_experts(module):
        return catalogue.EXPERTS
    return catalogue.MLPS if has_gated_projections(module) else None


def _holds_experts(module: nn.Module) -> bool:
    """Tell whether a module has several modules in a list, or weights of several experts in one, and no child has."""
    children = list(module.children())
    if any(classify_class(type(child)) is catalogue.EXPERTS for child in children):
        return False
    lists = [child for child in children if isinstance(child, (nn.ModuleList, nn.ModuleDict))]
    own = [p for each in (module, *children) for p in each._parameters.values() if p is not None]
    weights = [p for p in own if not is_lazy(p)]
    return any(len(each) > 1 for each in lists) or any(p.dim() == 3 for p in weights)


def is_classified_by_name(cls: type[nn.Module]) -> bool:
    """Tell whether an instance of a class without a kind may have one, by its name or its pattern."""
    name = cls.__name__
    is_called_so = any(called.search(name) for called in (_ROUTING_NAMES, BLOCK_NAMES))
    return "norm" in name.lower() or is_called_so or find_pattern(cls) is not None


def has_gated_projections(module: nn.Module) -> bool:
    """Tell whether a module has the projections of a gated MLP, by the names that transformers gives them."""
    children = module._modules
    for names in _GATED:
        if names <= children.keys() and None not in [next(children[name].parameters(), None) for name in names]:  # type: ignore[union-attr]
            return True
    return False


def calls_attention_by_name(cls: type[nn.Module]) -> bool:
    """Tell whether the forward of a class calls the attention that its config names."""
    forward = inspect.unwrap(cls.forward)
    return isinstance(forward, FunctionType) and code_names(forward.__code__) >= _ATTENTION_BY_NAME


def attends(cls: type[nn.Module]) -> bool:
    """Tell whether a class computes attention: by the name in its config, or by its own name and a softmax.

    Other people's code that calls torch's attention has any name.
    """
    if calls_attention_by_name(cls) or torchs_attention(cls):
        return True
    is_named = _ATTENTION_NAMES.search(cls.__name__) and not _OTHER_ATTENTION.search(cls.__name__)
    return bool(is_named) and not _SOFTMAX.isdisjoint(used_names(cls))


def torchs_attention(cls: type[nn.Module]) -> str | None:
    """Return the function of torch that other people's code calls for attention, also in what a forward calls."""
    used = used_names(cls) if is_others(cls) else ()
    return next((name for name in _TORCHS_ATTENTION if name in used), None)


def is_others(cls: type) -> bool:
    """Tell whether a class is of other people's code."""
    return not written_class(cls).__module__.startswith(LIBRARIES)


def used_names(cls: type[nn.Module]) -> set[str]:
    """Return the attributes and global names that a forward uses, and those methods of its class that it names.

    In other people's code also those that functions use which these call, and the own names of what these call.
    What is called attention may have got its function when it was made.
    """
    forward = inspect.unwrap(cls.forward)
    methods, named = vars(written_class(cls)).items(), referenced_names(forward)
    if is_others(cls) and _ATTENTION_NAMES.search(cls.__name__):
        named = {*named, "__init__"}
    functions = [forward, *(inspect.unwrap(value) for name, value in methods if name in named and callable(value))]
    names: set[str] = set()
    for function in functions if is_others(cls) else ():  # grows while it runs
        called = list(_functions_called(function))
        names |= {each.__name__ for each in called}
        others = (each for each in called if not str(each.__module__).startswith(LIBRARIES))
        functions += [each for each in others if each not in functions]
    return names.union(*map(referenced_names, functions))


def _functions_called(function: Any) -> Iterator[Any]:
    """Yield the functions that a function names as globals, or as members of such a file, or imports by itself."""
    file = None
    for step, after in pairwise(instructions(function.__code__)) if isinstance(function, FunctionType) else ():
        value = function.__globals__.get(step.argval) if step.opname == "LOAD_GLOBAL" else None
        value = vars(value).get(after.argval) if isinstance(value, (ModuleType, SimpleNamespace)) else value
        if step.opname == "IMPORT_NAME":
            file = sys.modules.get(step.argval)
        elif step.opname == "IMPORT_FROM":
            value = getattr(file, step.argval, None)
        if isinstance(value, (BuiltinFunctionType, FunctionType)):
            yield value


def attends_by_itself(cls: type[nn.Module]) -> bool:
    """Tell whether a class takes the mask that a model made, and computes attention without asking any config."""
    if not _ATTENTION_NAMES.search(cls.__name__) or calls_attention_by_name(cls) or not attends(cls):
        return False
    return any("mask" in name for name in inspect.signature(cls.forward).parameters)


def attention_refusal(cls: type[nn.Module]) -> Reason | None:
    """Return why our attention does not take the place of that of a class; None where it does."""
    if not calls_attention_by_name(cls):
        return UNNAMED
    constants = inspect.unwrap(cls.forward).__code__.co_consts
    if any(isinstance(constant, tuple) and "position_bias" in constant for constant in constants):  # names of arguments
        return BIASED
    owner = next(base for base in cls.__mro__ if "forward" in vars(base))
    for name, reason in UNSUPPORTED[catalogue.ATTENTION.name].items():
        file, _, listed = name.partition(":")
        if owner.__name__ == listed:
            own = getattr(importlib.import_module(f"transformers.models.{file}.modeling_{file}"), listed, None)
            return reason if own is not None and (owner is own or computes_as(owner, own)) else None
    return None


def indexer_refusal(cls: type[nn.Module]) -> Reason | None:
    """Return why the kernel does not compute the scores of a class of indexers in parts; None where it does."""
    return None if indexer_rewriter(cls) is not None else reason(catalogue.INDEXERS, cls.__name__)


def classify_function(name: str, function: object) -> Kind | None:
    """Return the kind of a function, or of the module that `kernels` made of one, by the name in its file.

    It is known by its pattern, by transformers' decorator, or by its name and those of its helpers.
    """
    original = original_function(function)
    if original is None:
        return None
    if (pattern := find_pattern(function)) is not None:
        return pattern.kind
    if is_kernel_function(function):
        layer = type(function).kernel_layer_name  # type: ignore[attr-defined]
        if "rotary" in layer.lower():
            return catalogue.ROTARY
        if original.__module__.startswith("transformers."):
            return catalogue.LINEAR_ATTENTION if _LINEAR_NAMES.fullmatch(layer) else None
    used = referenced_names(original)
    if not ROTATING_NAMES.search(name) and not [callee for callee in used if callee.startswith("rotate")]:
        return None
    # one that leaves the rotation to a function that has a kernel does not rotate
    called = (value for name, value in original.__globals__.items() if name in used and not isinstance(value, type))
    return None if any(map(find_pattern, called)) else catalogue.ROTARY


def referenced_names(function: Any) -> AbstractSet[str]:
    """Return the attributes and global names that a function uses; none of anything else."""
    return code_names(function.__code__) if isinstance(function, FunctionType) else frozenset()


def rotary_methods(cls: type) -> list[str]:
    """Return the methods of a class itself that are called as rotations are, by their names."""
    named = {name: value for name, value in vars(cls).items() if _METHOD_NAMES.match(name)}
    return [name for name, value in named.items() if isinstance(value, (FunctionType, staticmethod))]


def reason(kind: Kind, name: str) -> Reason:
    """Return why no kernel serves what is called so."""
    return UNSUPPORTED.get(kind.name, {}).get(name, UNKNOWN)


def without_code(reason: Reason) -> str:
    """Return the sentence of a reason without the code in front of it."""
    return reason.removeprefix(f"{reason.code}: ")


def _looks_gated(cls: type[nn.Module]) -> bool:
    """Tell whether a forward has an activation and a product."""
    tree = function_tree(inspect.unwrap(cls.forward))
    if tree is None or not _ACTIVATIONS.search(ast.unparse(tree)):
        return False
    return any(isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) for node in ast.walk(tree))
