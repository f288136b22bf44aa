"""Acts that hook: modules, parameters, state dicts, and all modules of the process."""

from random import Random
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as of_all
from transformers.activations import SiLUActivation

from tests.support.programs.acts.activations import activations, has_activations
from tests.support.programs.registry import act
from tests.support.programs.side import Side

HOOKED = (
    "Linear",
    "Norm",
    "MLP",
    "Experts",
    "Attention",
    "DecoderLayer",
    "RotaryEmbedding",
    "SiLU",
    "SiLUActivation",
    "Mlp",
    "DeltaNet",
    "GELUActivation",
)


def scale_output(module: nn.Module, args: Any, output: Any) -> Any:
    """Scale what a module gives."""
    return output * 1.25 if isinstance(output, torch.Tensor) else (output[0] * 1.25, *output[1:])


def scale_input(module: nn.Module, args: Any) -> Any:
    """Scale what a module is given by position."""
    return (args[0] * 1.25, *args[1:]) if args and args[0].is_floating_point() else None


def scale_gradient(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
    """Scale the gradients of what a module is given."""
    return tuple(None if grad is None else grad * 1.25 for grad in grad_input)


def scale_gradient_of_output(module: nn.Module, grad_output: Any) -> Any:
    """Scale the gradients of what a module gives."""
    return tuple(None if grad is None else grad * 1.25 for grad in grad_output)


def double(gradient: torch.Tensor) -> torch.Tensor:
    """Double a gradient."""
    return 2 * gradient


def scale_state(module: nn.Module, state: dict, prefix: str, metadata: Any) -> None:
    """Scale a weight in a state dict, as converters do."""
    for name in state:
        if name.endswith("norm.weight"):
            state[name] = state[name] * 1.25


def keep(side: Side, handle: Any) -> None:
    """Keep the handle of a hook, for its removal."""
    side.held.setdefault("handles", []).append(handle)


def _choose(side: Side, choice: Random) -> nn.Module:
    return choice.choice(side.named(*HOOKED))[1]


@act()
def hook_a_module(side: Side, choice: Random) -> None:
    keep(side, _choose(side, choice).register_forward_hook(scale_output))


@act()
def hook_before_a_module(side: Side, choice: Random) -> None:
    keep(side, _choose(side, choice).register_forward_pre_hook(scale_input))


@act()
def hook_a_projection(side: Side, choice: Random) -> None:
    linears = [m for path, m in side.named("Linear") if "mlp" in path] or [m for _, m in side.named("Linear")]
    keep(side, choice.choice(linears).register_forward_hook(scale_output))


@act(has_activations)
def hook_an_activation(side: Side, choice: Random) -> None:
    keep(side, choice.choice(activations(side)).register_forward_hook(scale_output))


@act(has_activations)
def hook_the_gradient_of_an_activation(side: Side, choice: Random) -> None:
    keep(side, choice.choice(activations(side)).register_full_backward_hook(scale_gradient))


@act()
def hook_the_gradient_of_a_module(side: Side, choice: Random) -> None:
    keep(side, _choose(side, choice).register_full_backward_hook(scale_gradient))


@act()
def hook_the_gradient_before_a_module(side: Side, choice: Random) -> None:
    keep(side, _choose(side, choice).register_full_backward_pre_hook(scale_gradient_of_output))


@act()
def hook_the_gradient_of_a_parameter(side: Side, choice: Random) -> None:
    _, parameter = choice.choice(side.parameters())
    if parameter.requires_grad:
        keep(side, parameter.register_hook(double))


@act()
def hook_the_state_dict(side: Side, choice: Random) -> None:
    keep(side, side.model.register_state_dict_post_hook(scale_state))


# products and activations, which kernels compute without a call of the module
FUSED = (nn.Linear, nn.SiLU, SiLUActivation)


def of_fused(module: nn.Module, args: Any, output: Any) -> Any:
    """Scale what products and activations give, and nothing else."""
    return output * 1.0625 if isinstance(module, FUSED) else None


def before_fused(module: nn.Module, args: Any) -> Any:
    """Scale what products and activations are given, and nothing else."""
    return (args[0] * 1.0625,) if isinstance(module, FUSED) else None


def gradient_of_fused(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
    """Scale gradients of products and activations, and nothing else."""
    return scale_gradient(module, grad_input, grad_output) if isinstance(module, FUSED) else None


def _hook_all(side: Side, hooks: dict, register: Any, hook: Any) -> None:
    """Hook all modules of the process, once for both sides."""
    if hook not in hooks.values():
        side.cleanups.append(register(hook).remove)


@act()
def hook_all_modules(side: Side, choice: Random) -> None:
    _hook_all(side, of_all._global_forward_hooks, of_all.register_module_forward_hook, of_fused)


@act()
def hook_before_all_modules(side: Side, choice: Random) -> None:
    _hook_all(side, of_all._global_forward_pre_hooks, of_all.register_module_forward_pre_hook, before_fused)


@act()
def hook_the_gradients_of_all_modules(side: Side, choice: Random) -> None:
    register = of_all.register_module_full_backward_hook
    _hook_all(side, of_all._global_backward_hooks, register, gradient_of_fused)


@act(lambda side: bool(side.held.get("handles")))
def remove_hooks(side: Side, choice: Random) -> None:
    for handle in side.held.pop("handles"):
        handle.remove()
