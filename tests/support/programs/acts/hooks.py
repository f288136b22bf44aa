"""Acts that hook modules, parameters and all modules of the process, and in which something goes wrong."""

import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from random import Random
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from transformers.activations import SiLUActivation

import kernels_ext_npu
from tests.support.programs.acts.modules import activations, places, times
from tests.support.programs.acts.training import can_train
from tests.support.programs.registry import act, acts
from tests.support.programs.side import Side

HOOKED = (
    *("Linear", "Norm", "MLP", "Experts", "Attention", "DecoderLayer", "RotaryEmbedding", "SiLU", "SiLUActivation"),
    *("Mlp", "DeltaNet", "GELUActivation"),
)


# functions that pickles find by their names
def scale_output(module: nn.Module, args: Any, output: Any) -> Any:
    """Scale what a module gives."""
    return times(output)


def scale_input(module: nn.Module, args: Any) -> Any:
    """Scale what a module is given by position."""
    return times(args) if args and args[0].is_floating_point() else None


def scale_gradients(module: nn.Module, grads: Any, *rest: Any) -> Any:
    """Scale the gradients of what a module is given, or of what it gives."""
    return tuple(None if grad is None else grad * 1.25 for grad in grads)


# how a hook is registered, and what it does
KINDS: dict[str, Callable] = {
    "register_forward_hook": scale_output,
    "register_forward_pre_hook": scale_input,
    "register_full_backward_hook": scale_gradients,
    "register_full_backward_pre_hook": scale_gradients,
}


def hook(side: Side, module: nn.Module, kind: str) -> None:
    """Hook a module, and keep the handle for its removal."""
    side.held.setdefault("handles", []).append(getattr(module, kind)(KINDS[kind]))


acts(
    hook_a_module=lambda side, choice: hook(side, choice.choice(side.named(*HOOKED))[1], choice.choice(list(KINDS))),
)


@act()
def hook_a_projection(side: Side, choice: Random) -> None:
    linears = [m for path, m in side.named("Linear") if "mlp" in path] or [m for _, m in side.named("Linear")]
    hook(side, choice.choice(linears), "register_forward_hook")


acts(
    places,
    hook_an_activation=lambda side, choice: hook(side, choice.choice(activations(side)), "register_forward_hook"),
    hook_the_gradient_of_an_activation=lambda side, choice: hook(
        side, choice.choice(activations(side)), "register_full_backward_hook"
    ),
)


@act()
def hook_the_gradient_of_a_parameter(side: Side, choice: Random) -> None:
    _, parameter = choice.choice(side.parameters())
    if parameter.requires_grad:
        side.held.setdefault("handles", []).append(parameter.register_hook(lambda gradient: 2 * gradient))


@act(lambda side: bool(side.held.get("handles")))
def remove_hooks(side: Side, choice: Random) -> None:
    for handle in side.held.pop("handles"):
        handle.remove()


# ---- of all modules: products and activations, which kernels compute without a call of the module -------------------
FUSED = (nn.Linear, nn.SiLU, SiLUActivation)


def _hook_all(register: Any, hook: Callable) -> Callable[[Side, Random], None]:
    """Hook all modules of the process, for both sides; what others than products and activations do stays."""

    def call(module: nn.Module, *args: Any) -> Any:
        return hook(module, *args) if isinstance(module, FUSED) else None

    return lambda side, choice: side.cleanups.append(register(call).remove) if side.home == "cpu" else None


acts(
    hook_all_modules=_hook_all(hooks.register_module_forward_hook, lambda module, args, output: output * 1.0625),
    hook_before_all_modules=_hook_all(hooks.register_module_forward_pre_hook, lambda _, args: (args[0] * 1.0625,)),
    hook_the_gradients_of_all_modules=_hook_all(hooks.register_module_full_backward_hook, scale_gradients),
)


# ---- between layers where one token is decoded: a write of which no version tells ------------------------------------
def _layers(side: Side) -> list[Any]:
    """Return the layers of the last list of some, which is the decoder's where there are two."""
    lists = [m for m in side.model.modules() if isinstance(m, nn.ModuleList)]
    named = [list(m) for m in lists if all(type(n).__name__.endswith(("Layer", "Block")) for n in m) and len(m)]
    return named[-1] if named else []


def _write(x: Tensor) -> None:
    x.data.add_(torch.linspace(-1, 2, x.shape[-1], device=x.device, dtype=x.dtype))


@act(_layers)
def write_between_layers(side: Side, choice: Random) -> None:
    """By a hook of one of them, behind it or before it."""
    layer = choice.choice(_layers(side))
    if choice.random() < 0.5:
        handle = layer.register_forward_hook(lambda _, args, y: _write(y[0] if isinstance(y, tuple) else y))
    else:
        handle = layer.register_forward_pre_hook(lambda _, args: _write(args[0]) if args else None)
    token = {key: side.inputs[key][:, :1] for key in ("input_ids", "decoder_input_ids") if key in side.inputs}
    with choice.choice([torch.no_grad, torch.inference_mode])():
        side.show(side.run_text(**token, labels=None).logits)
    handle.remove()


# ---- something goes wrong in the middle, and the user goes on --------------------------------------------------------
CALLS = (1, 3, 10, 30, 100, 300, 1000)  # until somebody interrupts


class StoppedError(RuntimeError):
    """What goes wrong."""


def stop(*args: Any) -> None:
    """Go wrong."""
    raise StoppedError


@act(can_train)
def fail_in_a_step(side: Side, choice: Random) -> None:
    """In its forward or its backward."""
    _, module = choice.choice(side.named(*HOOKED))
    handle = getattr(module, choice.choice(["register_forward_hook", "register_full_backward_hook"]))(stop)
    with suppress(StoppedError):
        side.run().loss.backward()
    side.model.zero_grad()
    handle.remove()


def _interrupt(side: Side, what: Any, calls: int) -> None:
    """Stop a function of ours after so many calls of functions of ours, as somebody at a keyboard does."""
    left = calls

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left
        is_generator = frame.f_code.co_flags & inspect.CO_GENERATOR  # what is raised in one that ends is lost
        if event == "call" and "kernels_ext_npu" in frame.f_code.co_filename and not is_generator:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        with suppress(KeyboardInterrupt):
            what(side.model)
    finally:
        sys.setprofile(before)


acts(
    lambda side: side.device.type == side.home,
    is_ours=True,
    interrupt_kernelize=lambda side, choice: _interrupt(side, kernels_ext_npu.kernelize, choice.choice(CALLS)),
)
acts(
    is_ours=True,
    interrupt_restore=lambda side, choice: _interrupt(side, kernels_ext_npu.restore, choice.choice(CALLS)),
)
