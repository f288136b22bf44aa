"""The gated MLPs of transformers, and on which instances the kernels serve them: the activation of one decides.

Some do more than multiply: they drop out, clamp, scale, norm, or choose weights by layer.
"""

from collections.abc import Callable
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from kernels_ext_npu.module_state import has_hooks
from kernels_ext_npu.patterns.pattern import Guard, Pattern, misread

ACTIVATED_BY = {"SwiGLUMLP": nn.SiLU(), "GeGLUMLP": nn.GELU(approximate="tanh"), "ExactGeGLUMLP": nn.GELU()}
# in the order in which the kernel looks for them: those of gate, up and down; of both and down; and the activation
_THREE_PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("wi_0", "wi_1", "wo"))
_TWO_PROJECTIONS = (("gate_up_proj", "down_proj"), ("input_linear", "output_linear"), ("Wi", "Wo"), ("fc1", "fc2"))
_ACTIVATIONS = ("act_fn", "activation_fn", "activation", "act")
GATED = tuple(ACTIVATED_BY)
FUSED = tuple(f"Fused{layer}" for layer in GATED)


def activation_function(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the activation of an instance, which transformers sets from the config.

    Lfm2 has none: its forward says silu.
    """
    name = _named_activation(type(module).forward)
    return F.silu if name is None else getattr(module, name)


@cache
def _named_activation(forward: FunctionType) -> str | None:
    """Return the activation that a forward names; None if it names none."""
    return next((name for name in _ACTIVATIONS if name in forward.__code__.co_names), None)


def activated_layer(module: nn.Module) -> str | None:
    """Return the layer with the activation of an instance; None if no layer has it.

    It is told by its values: many classes have one formula.
    """
    activation = activation_function(module)
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
            if isinstance(values, Tensor) and torch.allclose(values, kernel.forward(grid), rtol=0, atol=1e-5):
                return layer
    return None


def gated_layer(module: nn.Module) -> str:
    """Return which of GATED serves an instance, or would if it had its activation."""
    return activated_layer(module) or GATED[0]


def refuse_activation(module: nn.Module) -> str | None:
    named = _named_activation(type(module).forward)
    places = module._modules, vars(module)  # in the order in which the kernel looks
    held = [name for members in places for name in _ACTIVATIONS if name in members]
    taken = held[0] if held else None
    if taken != named:
        return misread(taken, named)
    activation = activation_function(module)
    if has_hooks(activation):
        return "hooks watch its activation, which the kernel does not call"
    if activated_layer(module) is None:
        name = getattr(activation, "__name__", type(activation).__name__)
        return f"its activation is {name}, the kernels have silu and gelu"
    return None


def refuse_gated(module: nn.Module) -> str | None:
    if (reason := _refuse_projections(module, _THREE_PROJECTIONS)) is not None:
        return reason
    names = _named_projections(type(module).forward, _THREE_PROJECTIONS)
    sizes = [getattr(module._modules[name], "out_features", None) for name in names]
    if sizes[0] != sizes[1]:
        return f"{names[0]} gives {sizes[0]} values and {names[1]} {sizes[1]}"
    return refuse_activation(module)


def refuse_fused(module: nn.Module) -> str | None:
    return _refuse_projections(module, _TWO_PROJECTIONS) or refuse_activation(module)


def _refuse_projections(module: nn.Module, groups: tuple[tuple[str, ...], ...]) -> str | None:
    """Return why the kernel would not take the projections that a forward names; None if it does."""
    named, held = _named_projections(type(module).forward, groups), module._modules
    taken = [group for group in groups if group[0] in held]
    if taken[:1] != [named]:
        return misread(taken[0][0] if taken else None, named[0])
    missing = [name for name in named if name not in held]
    return misread(None, missing[0]) if missing else None


def projection_names(cls: type[nn.Module]) -> tuple[str, ...]:
    """Return the names of gate, up and down in a class whose forward is that of a gated MLP with three projections."""
    return _named_projections(cls.forward, _THREE_PROJECTIONS)  # type: ignore[arg-type]


@cache
def _named_projections(forward: FunctionType, groups: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    return next(group for group in groups if group[0] in forward.__code__.co_names)


def _refuse_all_but_silu(module: nn.Module) -> str | None:
    reason = refuse_gated(module)
    if reason is None and activated_layer(module) != "SwiGLUMLP":
        return "its activation is not silu, the only one of which the kernel takes a clamped or scaled gate"
    return reason


def _refuse_limit(module: nn.Module) -> str | None:
    names, members = ("limit", "swiglu_limit"), vars(module)  # in the order in which the kernel looks for them
    named, taken = (
        next((n for n in names if n in place), None) for place in (type(module).forward.__code__.co_names, members)
    )
    if taken is None or taken != named:
        return misread(taken, named)
    limit = members[taken]
    if not isinstance(limit, (float, int)) or limit <= 0:
        return f"its limit is {limit!r}, not a positive number"
    return _refuse_all_but_silu(module)


def _refuse_multipliers(module: Any) -> str | None:
    factors = module.gate_multiplier, module.down_multiplier
    if not all(isinstance(factor, (float, int)) for factor in factors) or not factors[0]:
        return f"its multipliers are {factors}, not numbers of which the first is not zero"
    return _refuse_all_but_silu(module)


_DENSE = Guard(
    lambda mlp: mlp.activation_sparsity <= 0,
    "it keeps the largest gates only (activation_sparsity is {0.activation_sparsity})",
)
_UNCLAMPED = Guard(
    lambda mlp: mlp.limit == float("inf"),
    "it clamps what its activation gives (limit is {0.limit}), which no operator does",
)

_by_activation = partial(Pattern, layers=GATED, limits=refuse_gated, choose=gated_layer)
_fused_by_activation = partial(Pattern, layers=FUSED, limits=refuse_fused, choose=lambda m: f"Fused{gated_layer(m)}")
PATTERNS = (
    _by_activation("llama:LlamaMLP"),
    _by_activation("recurrent_gemma:RecurrentGemmaMlp"),
    _by_activation("gemma3n:Gemma3nTextMLP", guard=_DENSE),
    _by_activation("beam:BeamMLP"),  # multiplies in float32, as the kernel does for all of them
    _by_activation("llama4:Llama4TextMLP"),
    _by_activation("lfm2:Lfm2MLP"),
    _by_activation("mixtral:MixtralBlockSparseTop2MLP"),
    _by_activation("step3p7:Step3p7MLP", guard=_UNCLAMPED),
    _fused_by_activation("phi3:Phi3MLP"),
    _fused_by_activation("granitemoeshared:GraniteMoeSharedMLP"),
    Pattern("t5gemma:T5GemmaMLP", ("DropoutMLP",), refuse_gated),
    Pattern("longt5:LongT5DenseGatedActDense", ("DropoutMLP",), refuse_gated),
    Pattern("t5:T5DenseGatedActDense", ("DropoutMLP",), refuse_gated),
    Pattern("modernbert:ModernBertMLP", ("FusedDropoutMLP",), refuse_fused),
    Pattern("seed_oss:SeedOssMLP", ("DroppedMLP",), refuse_gated),
    Pattern("inkling:InklingMLP", ("GloballyScaledMLP",), refuse_gated),
    Pattern("bitnet:BitNetMLP", ("NormedMLP",), refuse_gated),
    Pattern("deepseek_v4:DeepseekV4MLP", ("ClampedSwiGLUMLP",), _refuse_limit),
    Pattern("glm5_next:Glm5NextTextMLP", ("ClampedSwiGLUMLP",), _refuse_limit),
    Pattern("falcon_h1:FalconH1MLP", ("ScaledSwiGLUMLP",), _refuse_multipliers),
    Pattern("moshi:MoshiGatingMLP", ("FusedMLPByLayer",), refuse_fused),
    Pattern("zamba2:Zamba2MLP", ("FusedAdaptedMLP",), refuse_fused),
)
