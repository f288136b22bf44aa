"""One function of the kernel on the machine at hand: publishing checks it before and after."""

from types import ModuleType

from torch import Tensor


def trial(kernel: ModuleType, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a function of the kernel gives for ``x``, ``[3, 8]`` in float32, and what it has to give."""
    return kernel.quick_gelu(x), x / (1 + (-1.702 * x).exp())
