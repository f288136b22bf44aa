"""Stand in for an Ascend device: the real torch_npu wheel runs on a machine without CANN or an NPU.

``import softnpu`` before torch; afterwards ``torch.device("npu")`` works, with torch_npu's own schemas, allocator,
streams, autograd formulas and meta kernels, while the operators run on the host. On a machine with an Ascend
device the import changes nothing.

It computes what the sources of the operators say and refuses what the device refuses. It says nothing about time.
"""

import sys
from contextlib import AbstractContextManager, nullcontext

from softnpu import runtime
from softnpu.collective_counting import collectives
from softnpu.counting import counters, reset_counters

_software = not runtime.real_device()

if _software:
    runtime.refuse_late_import()
    _library = runtime.load()
    _excepthook = sys.excepthook
    try:
        import torch_npu  # noqa: F401  and torch with it
    except ModuleNotFoundError as error:
        raise ImportError(
            f"softnpu runs the real torch_npu wheel, but {error.name} is not installed: "
            "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu, "
            "then pip install --no-deps torch_npu==2.13.0 and pip install numpy pyyaml"
        ) from error

    # torch_npu's calls it, and below the traceback it prints ERR99999 for whatever its own code has not raised
    sys.excepthook = _excepthook

    from softnpu import aten_kernels, counting, formulas, graph_capture, hccl

    counting.attach(_library)
    graph_capture.attach(_library)
    aten_kernels.install()
    formulas.install()
    hccl.install()

__all__ = ["collectives", "counters", "is_software", "poisoned_memory", "reset_counters"]


def is_software() -> bool:
    """Tell whether the software device serves as ``npu``: False where a real one does and softnpu changes nothing.

    Example:
        >>> import softnpu
        >>> softnpu.is_software()
        True
    """
    return _software


def poisoned_memory() -> AbstractContextManager[None]:
    """Open a context in which fresh device memory holds NaN, so that reading what nobody wrote is seen.

    Without effect on a real device.

    Example:
        >>> import softnpu
        >>> import torch
        >>> with softnpu.poisoned_memory():
        ...     torch.empty(2, device="npu")
        tensor([nan, nan], device='npu:0')
    """
    if not _software:
        return nullcontext()
    from softnpu import memory_poisoning

    return memory_poisoning.poisoned_memory()
