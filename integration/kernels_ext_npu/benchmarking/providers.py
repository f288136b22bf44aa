"""Who computes a call: transformers' original, our kernels, and LLaMA-Factory's where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from functools import partial

from torch import nn
from transformers import PreTrainedModel

import kernels_ext_npu
from kernels_ext_npu.benchmarking.recorded_calls import Call
from kernels_ext_npu.environment import installed
from kernels_ext_npu.matching.function_scan import CalledFunction, called_functions

ORIGINAL, OURS, LLAMA_FACTORY = "transformers", "kernels-ext-npu", "LLaMA-Factory"
# in the order of LLaMA-Factory's own "auto"
LLAMA_FACTORY_KERNELS = ("npu_fused_moe", "npu_fused_rmsnorm", "npu_fused_rope", "npu_fused_swiglu")
LLAMA_FACTORY_INTERFACE = "llamafactory.v1.plugins.model_plugins.kernels.interface"

# why a call of a model is not served, None if it is
Refusal = Callable[[Call], "str | None"]
# puts kernels into a model, and the process, while the context is open, and gives why a call has none
Provider = Callable[[PreTrainedModel], AbstractContextManager[Refusal]]


def providers() -> tuple[dict[str, Provider], str]:
    """Return who is here, by name, and the version of LLaMA-Factory, or why it is not one of them."""
    found: dict[str, Provider] = {ORIGINAL: lambda model: nullcontext(lambda call: None), OURS: _ours}
    if importlib.util.find_spec("llamafactory") is None:
        return found, "not installed"
    version = installed("llamafactory") or "of unknown version"  # a folder on the path
    try:
        with redirect_stdout(sys.stderr):  # its log
            apply = importlib.import_module(LLAMA_FACTORY_INTERFACE).apply_kernel
    except Exception as error:  # whatever its modules need
        return found, f"{version}, whose NPU kernels cannot be imported: {error}"
    return found | {LLAMA_FACTORY: partial(_llama_factory, apply)}, version


@contextmanager
def _ours(model: PreTrainedModel) -> Iterator[Refusal]:
    """Register all kernels and swap them into a model."""
    kernels_ext_npu.register()
    try:
        kernels_ext_npu.kernelize(model)
        found = kernels_ext_npu.report(model)
        reasons = {row.path: row.reason for row in (*found, *found.projections) if not row.swapped}
        yield lambda call: reasons.get(call.path)
    finally:
        kernels_ext_npu.unregister()


@contextmanager
def _llama_factory(apply: Callable, model: PreTrainedModel) -> Iterator[Refusal]:
    """Apply the kernels that LLaMA-Factory 1 has for NPUs, by its own interface.

    The rotary functions in transformers' modules, which it replaces for good, are put back.
    """
    called = {callee for module in model.modules() for callee in called_functions(type(module))}
    originals = {callee: callee.function for callee in called}
    try:
        with redirect_stdout(sys.stderr):
            for kernel in LLAMA_FACTORY_KERNELS:
                apply(kernel, model=model)
        yield lambda call: None if _is_changed(call, model, originals) else "it has no kernel for it"
    finally:
        for callee, original in originals.items():
            vars(sys.modules[callee.file])[callee.name] = original


def _is_changed(call: Call, model: nn.Module, originals: dict[CalledFunction, Callable]) -> bool:
    """Tell whether a call computes otherwise than before."""
    if call.callee is not None:
        return call.target(model) is not originals[call.callee]
    if call.kernel in ("layer", "step"):
        changed = any("forward" in vars(module) for module in model.get_submodule(call.path).modules())
        return changed or any(callee.function is not original for callee, original in originals.items())
    return "forward" in vars(call.target(model))
