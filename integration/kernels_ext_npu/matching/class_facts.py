"""What finders ask of the classes in a model, asked once of a class with its forward and mark, which may change."""

from __future__ import annotations

import functools
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

from torch import nn

from kernels_ext_npu.catalogue import ACTIVATIONS, MLPS, NORMS, Kind
from kernels_ext_npu.matching.classification import (
    attends,
    calls_attention_by_name,
    classify_class,
    is_classified_by_name,
    is_others,
    used_names,
)
from kernels_ext_npu.matching.fingerprint import is_experts_class
from kernels_ext_npu.matching.function_scan import CalledFunction, called_functions
from kernels_ext_npu.matching.lookup import find_pattern
from kernels_ext_npu.patterns.pattern import Pattern
from kernels_ext_npu.syntax.indexers import indexer_rewriter

_GROUPED_MM = {"grouped_mm", "_grouped_mm"}  # torch's products, by which experts in one tensor multiply
_RUN = (NORMS, MLPS, ACTIVATIONS)  # kinds by which classes of transformers are known without a pattern


class ClassFacts(NamedTuple):
    """What a class is."""

    pattern: Pattern | None  # what its forward computes; None if no pattern matches
    kind: Kind | None  # what its modules are; None if it has none, or only some of its instances
    may_have_kind: bool  # whether the name of the class lets an instance have one
    attends: bool  # whether it computes attention
    names_attention: bool  # whether it calls the attention that its config names
    is_indexer: bool  # whether it is an indexer whose forward is known
    is_experts: bool  # whether it calls the experts implementation that its config names
    calls_grouped_mm: bool  # whether it is of other people's code, and calls torch's products by groups
    is_others: bool  # whether it is of other people's code
    names: AbstractSet[str]  # the attributes and functions that its forward uses, if it is of other people's code
    is_run: bool  # whether it is run to find what it computes: no pattern knows it, and it may be what a layer computes
    functions: tuple[CalledFunction, ...]  # those that it calls, and that kernels may serve


@functools.cache
def class_facts(
    cls: type[nn.Module], forward: object, mark: str | None, methods: tuple[tuple[str, Any], ...]
) -> ClassFacts:
    """Return what there is to know of a class that has this forward, mark of `kernels`, and methods now."""
    pattern, kind, others = find_pattern(cls), classify_class(cls), is_others(cls)
    names = used_names(cls) if others else frozenset()
    return ClassFacts(
        pattern=pattern,
        kind=kind,
        may_have_kind=kind is None and is_classified_by_name(cls),
        attends=attends(cls) or forward is nn.MultiheadAttention.forward,
        names_attention=calls_attention_by_name(cls),
        is_indexer=indexer_rewriter(cls) is not None,
        is_experts=is_experts_class(cls),
        calls_grouped_mm=not _GROUPED_MM.isdisjoint(names),
        is_others=others,
        names=names,
        is_run=pattern is None and _is_run(cls, forward, kind),
        functions=called_functions(cls),
    )


def _is_run(cls: type[nn.Module], forward: object, kind: Kind | None) -> bool:
    """Tell whether the forward of a class is of the library of the class, and may compute what a layer does.

    That may be anything in other people's code, and in transformers what looks like one of the kinds that are run; what
    torch has needs no kernel that is found so.
    """
    # not what a wrapper says of itself; torch's decorators, such as autocast and compile, are run as they are
    library = _library(forward)
    while library == "torch" and hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
        library = _library(forward)
    is_own = library in {each.__module__.partition(".")[0] for each in cls.__mro__}
    return is_own and library != "torch" and (library != "transformers" or kind in _RUN)


def _library(function: object) -> str:
    return getattr(function, "__globals__", {}).get("__name__", "").partition(".")[0]
