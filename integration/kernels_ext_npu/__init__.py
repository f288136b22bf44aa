"""Fused kernels for Huawei Ascend NPUs in Hugging Face transformers.

``kernels_ext_npu.register()`` once; from then on ``from_pretrained(..., device_map="npu", use_kernels=True)`` swaps
the kernels in, ``report(model)`` says what was swapped and what was not, and why.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernels_ext_npu.distribution.sources import load
    from kernels_ext_npu.environment import UnsupportedEnvironmentError
    from kernels_ext_npu.lifecycle.kernelize import kernelize, restore
    from kernels_ext_npu.lifecycle.register import register, unregister
    from kernels_ext_npu.reporting.report import Report, report
    from kernels_ext_npu.swaps.decision import Row
    from kernels_ext_npu.training.indexer_loss import train_indexer

__version__ = "0.1.0"

__all__ = [
    "Report",
    "Row",
    "UnsupportedEnvironmentError",
    "kernelize",
    "load",
    "register",
    "report",
    "restore",
    "train_indexer",
    "unregister",
]

# Imported when first used: torch must not be imported before softnpu, and --help should not wait for transformers.
_MODULES = {
    "Report": "reporting.report",
    "Row": "swaps.decision",
    "UnsupportedEnvironmentError": "environment",
    "kernelize": "lifecycle.kernelize",
    "load": "distribution.sources",
    "register": "lifecycle.register",
    "report": "reporting.report",
    "restore": "lifecycle.kernelize",
    "train_indexer": "training.indexer_loss",
    "unregister": "lifecycle.register",
}


def __getattr__(name: str) -> Any:
    if name == "transpose_experts":
        raise AttributeError(
            "kernels_ext_npu.transpose_experts is gone: npu_grouped_matmul reads the weights of experts as "
            "transformers stores them, and copies none. Leave the call out; nothing takes its place"
        )
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
