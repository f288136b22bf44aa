"""What finders ask of the classes in a model, asked once of a class and its forward, which libraries replace."""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch import nn

from kernels_ext_npu.catalogue import Kind
from kernels_ext_npu.matching.classification import (
    attends,
    calls_attention_by_name,
    classify_class,
    is_classified_by_name,
)
from kernels_ext_npu.matching.fingerprint import is_experts_class
from kernels_ext_npu.matching.function_scan import CalledFunction, called_functions
from kernels_ext_npu.matching.indexer_scan import indexer_rewriter
from kernels_ext_npu.matching.lookup import find_pattern
from kernels_ext_npu.patterns.pattern import Pattern


class ClassFacts(NamedTuple):
    """What a class is.

    Attributes:
        pattern: what its forward computes; None if no pattern matches.
        kind: what its modules are; None if it has none, or only some of its instances.
        may_have_kind: whether the name of the class lets an instance have one.
        attends: whether it computes attention.
        names_attention: whether it calls the attention that its config names.
        is_indexer: whether it is an indexer whose forward is known.
        is_experts: whether it calls the experts implementation that its config names.
        functions: those that it calls, and that kernels may serve.
    """

    pattern: Pattern | None
    kind: Kind | None
    may_have_kind: bool
    attends: bool
    names_attention: bool
    is_indexer: bool
    is_experts: bool
    functions: tuple[CalledFunction, ...]


@functools.cache
def class_facts(cls: type[nn.Module], forward: object) -> ClassFacts:
    """Return what there is to know of a class that has this forward now."""
    kind = classify_class(cls)
    return ClassFacts(
        pattern=find_pattern(cls),
        kind=kind,
        may_have_kind=kind is None and is_classified_by_name(cls),
        attends=attends(cls),
        names_attention=calls_attention_by_name(cls),
        is_indexer=indexer_rewriter(cls) is not None,
        is_experts=is_experts_class(cls),
        functions=called_functions(cls),
    )
