"""Which of the kernels' activations an MLP has: that of an instance decides."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from kernels_ext_npu.patterns.hooks import has_hooks

ACTIVATED_BY: dict[str, Callable[[Tensor], Tensor]] = {
    "SwiGLUMLP": F.silu,
    "GeGLUMLP": partial(F.gelu, approximate="tanh"),
    "ExactGeGLUMLP": F.gelu,
}
GATED = tuple(ACTIVATED_BY)
FUSED = tuple(f"Fused{layer}" for layer in GATED)


def activation_of(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the activation of an instance, which transformers sets from the config.

    Lfm2 has none: its forward says silu.
    """
    names = [name for name in ("act_fn", "activation_fn", "activation", "act") if hasattr(module, name)]
    return getattr(module, names[0]) if names else F.silu


def activated_layer(module: nn.Module) -> str | None:
    """Return the layer with the activation of an instance; None if no layer has it.

    It is told by its values: many classes have one formula.
    """
    activation = activation_of(module)
    if isinstance(activation, nn.Module) and any(True for _ in (*activation.parameters(), *activation.buffers())):
        return None
    with _disable_current_modes(), torch.no_grad():  # with fake tensors there would be no values
        grid = torch.linspace(-9, 9, 181, device="cpu")
        try:
            values = getattr(activation, "forward", activation)(grid.clone())  # not its hooks
        except Exception:  # it wants something else than one tensor on the CPU
            return None
        for layer, kernel in ACTIVATED_BY.items():
            # float32 leaves 1e-6 between two ways to compute tanh; GELU and its form with tanh are 4e-4 apart
            if isinstance(values, Tensor) and torch.allclose(values, kernel(grid), rtol=0, atol=1e-5):
                return layer
    return None


def gated_layer(module: nn.Module) -> str:
    """Return which of GATED serves an instance, or would if it had its activation."""
    return activated_layer(module) or GATED[0]


def fused_layer(module: nn.Module) -> str:
    """Return which of FUSED serves an instance, or would if it had its activation."""
    return f"Fused{gated_layer(module)}"


def refuse_activation(module: nn.Module) -> str | None:
    activation = activation_of(module)
    if has_hooks(activation):
        return "hooks watch its activation, which the kernel does not call"
    if activated_layer(module) is None:
        name = getattr(activation, "__name__", type(activation).__name__)
        return f"its activation is {name}, the kernels have silu and gelu"
    return None


def refuse_gated(module: nn.Module) -> str | None:
    pairs = (("w1", "w3"), ("wi_0", "wi_1"), ("gate_proj", "up_proj"))
    names = next(names for names in pairs if hasattr(module, names[0]))
    sizes = [getattr(getattr(module, name), "out_features", None) for name in names]
    if sizes[0] != sizes[1]:
        return f"{names[0]} gives {sizes[0]} values and {names[1]} {sizes[1]}"
    return refuse_activation(module)
