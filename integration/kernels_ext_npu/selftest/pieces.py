"""All that a selftest does, in order, each piece by an id that is known before it runs."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

import kernels_ext_npu
import softnpu
from kernels_ext_npu.catalogue import REPOSITORIES
from kernels_ext_npu.demo import model_comparison
from kernels_ext_npu.distribution import sources
from kernels_ext_npu.measuring.costs import peak
from kernels_ext_npu.measuring.distance import MODEL_BOUNDS, models_agree
from kernels_ext_npu.model_configs import TINY
from kernels_ext_npu.selftest import comparing
from kernels_ext_npu.selftest.cases import Case, Function
from kernels_ext_npu.selftest.functions import FUNCTIONS
from kernels_ext_npu.selftest.layers.layer_cases import CASES
from kernels_ext_npu.selftest.limits import LIMITS
from kernels_ext_npu.selftest.operator_call import OperatorCall
from kernels_ext_npu.selftest.operators import OPERATORS

QUICK_MODELS = ("Qwen3", "Qwen3-MoE")
Piece = Callable[[], dict[str, Any]]
_kernel = cache(sources.load_package)
_ALONE = {"operators": OPERATORS, "limits": LIMITS}  # in this order: a call beyond a limit may leave a dead device


def pieces(quick: bool, source: str = "bundled") -> dict[str, Piece]:
    """Return what there is to do with the kernels of a source, by id.

    Args:
        quick: functions only with what every machine has to take, in bfloat16 and float32, and two models.

    Operators that are called alone come last.
    """
    gc.freeze()  # what was imported stays: a collection looks at what a piece left only
    cases: tuple[Case, ...] = (*FUNCTIONS, *CASES)
    found: dict[str, Piece] = {}
    for repository in REPOSITORIES:
        for case in cases:
            if case.repository != repository or (quick and (case.at or not isinstance(case, Function))):
                continue
            for dtype in (torch.float32, torch.bfloat16) if quick else comparing.DTYPES:
                found[f"{repository} | {case.title} | {name(dtype)}"] = partial(_compare_case, case, dtype, source)
    for model in QUICK_MODELS if quick else TINY:
        found[f"models | {model} | float32"] = partial(_compare_model, model, source)
    return found if quick else found | {identity: call.ask for identity, call in _alone().items()}


def refused() -> set[str]:
    """Return the ids of what this release of CANN does not take, as its sources say."""
    return {identity for identity, call in _alone().items() if call.is_refused}


def _alone() -> dict[str, OperatorCall]:
    return {f"{group} | {call.title} | {name(call.dtype)}": call for group, calls in _ALONE.items() for call in calls}


def name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without that of its package."""
    return str(dtype).removeprefix("torch.")


def _compare_case(case: Case, dtype: torch.dtype, source: str) -> dict[str, Any]:
    kernel = _kernel(source, case.repository)
    gc.collect()
    with peak() as held:
        found = case.compare(kernel, dtype)
    tolerance = comparing.TOLERANCE[dtype]
    judged = {"tolerance": tolerance, "agrees": found.largest <= tolerance, "peak_bytes": held.number}
    return found._asdict() | judged


def _compare_model(model: str, source: str) -> dict[str, Any]:
    """Compare a whole tiny model of the demo, in float32, with its original on the host."""
    gc.collect()
    with peak() as held, tempfile.TemporaryDirectory() as folder:
        kernels_ext_npu.register(source=source)
        try:
            model_comparison.save(model, Path(folder))
            found = model_comparison.compare(Path(folder), steps=0)
        finally:
            kernels_ext_npu.unregister()
            gc.collect()
    swapped = sum(row.swapped for row in found.report)
    return {
        "forward": found.logits,
        "backward": found.gradient,
        "tolerance": MODEL_BOUNDS[softnpu.is_software()],
        "agrees": models_agree(found.logits, found.gradient) and swapped > 0,
        "swapped": swapped,
        "waits": list(found.waits),
        "peak_bytes": held.number,
    }
