"""Who computes a call: transformers' original, our kernels, and LLaMA-Factory's where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout

from torch import nn
from transformers import PreTrainedModel

import kernels_ext_npu
from kernels_ext_npu.benchmarking.recorded_calls import Call
from kernels_ext_npu.environment import installed
from kernels_ext_npu.matching.function_scan import Use, uses

ORIGINAL, OURS, LLAMA_FACTORY = "transformers", "kernels-ext-npu", "LLaMA-Factory"
# in the order of LLaMA-Factory's own "auto"
LLAMA_FACTORY_KERNELS = ("npu_fused_moe", "npu_fused_rmsnorm", "npu_fused_rope", "npu_fused_swiglu")
LLAMA_FACTORY_INTERFACE = "llamafactory.v1.plugins.model_plugins.kernels.interface"

# why a call of a model is not served, None if it is
Refusal = Callable[[Call], "str | None"]


class Provider:
    """Whoever can compute the calls of a model: transformers as it is, unless a kind of provider has kernels."""

    name = ORIGINAL

    @contextmanager
    def applied(self, model: PreTrainedModel) -> Iterator[Refusal]:
        """Put its kernels into the model, and the process, while the context is open; give why a call has none."""
        yield lambda call: None


class Ours(Provider):
    """The provider that swaps in the kernels of this package."""

    name = OURS

    @contextmanager
    def applied(self, model: PreTrainedModel) -> Iterator[Refusal]:
        """Register all kernels and swap them into the model."""
        kernels_ext_npu.register()
        try:
            kernels_ext_npu.kernelize(model)
            found = kernels_ext_npu.report(model)
            reasons = {row.path: row.reason for row in (*found, *found.projections) if not row.swapped}
            yield lambda call: reasons.get(call.path)
        finally:
            kernels_ext_npu.unregister()


class LlamaFactory(Provider):
    """The provider of the kernels that LLaMA-Factory 1 applies to a model on an NPU, by its own interface.

    Raises:
        ImportError: it is not installed, cannot be imported, or is a release without these kernels.
    """

    name = LLAMA_FACTORY

    def __init__(self) -> None:
        if importlib.util.find_spec("llamafactory") is None:
            raise ImportError("not installed")
        self.version = installed("llamafactory") or "of unknown version"  # a folder on the path
        try:
            with redirect_stdout(sys.stderr):  # its log
                self._apply = importlib.import_module(LLAMA_FACTORY_INTERFACE).apply_kernel
        except Exception as error:  # whatever its modules need
            raise ImportError(f"{self.version}, whose NPU kernels cannot be imported: {error}") from error

    @contextmanager
    def applied(self, model: PreTrainedModel) -> Iterator[Refusal]:
        """Apply its kernels, and put back the rotary functions in transformers' modules, which it replaces for good."""
        called = {use for module in model.modules() for use in uses(type(module))}
        originals = {use: use.function for use in called}
        try:
            with redirect_stdout(sys.stderr):
                for kernel in LLAMA_FACTORY_KERNELS:
                    self._apply(kernel, model=model)
            yield lambda call: None if self._serves(call, model, originals) else "it has no kernel for it"
        finally:
            for use, original in originals.items():
                vars(sys.modules[use.file])[use.name] = original

    @staticmethod
    def _serves(call: Call, model: nn.Module, originals: dict[Use, Callable]) -> bool:
        if call.use is not None:
            return call.target(model) is not originals[call.use]
        if call.kernel in ("layer", "step"):
            changed = any("forward" in vars(module) for module in model.get_submodule(call.path).modules())
            return changed or any(use.function is not original for use, original in originals.items())
        return "forward" in vars(call.target(model))


def providers() -> tuple[list[Provider], str]:
    """Return the providers that are here, and the version of LLaMA-Factory, or why it is not one of them."""
    found: list[Provider] = [Provider(), Ours()]
    try:
        peer = LlamaFactory()
    except ImportError as error:
        return found, str(error)
    return [*found, peer], peer.version
