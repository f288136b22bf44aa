"""One function of the kernel on the machine at hand: publishing checks it before and after."""

from types import ModuleType

from torch import Tensor


def trial(kernel: ModuleType, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a function of the kernel gives for ``x``, ``[3, 8]`` in float32, and what it has to give."""
    tokens = x.view(1, 3, 1, 8)
    found = kernel.flash_attn_func(tokens, tokens, tokens, softmax_scale=1.0)
    return found.view(3, 8), (x @ x.t()).softmax(-1) @ x
