"""Fused add and norm in decoding: a residual sum and the norm behind it in one launch.

A decoding step costs the host its launches, and two thirds of those that only add are followed by a norm. The forward
of such layers is rewritten (syntax/residuals.py). The rewritten one runs where a layer decodes one token a
sequence without gradients; otherwise that of its class does.

Each layer also norms its own result for the next layer, where the model's forward only passes it on. The normed tensor
is kept with the running forward of the model, never on a tensor, and where a hook or a wrapper sees what goes from
layer to layer nothing is normed ahead.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from kernels_ext_npu.binding import registration, step_aside
from kernels_ext_npu.binding.loaded_kernels import MATCHED, class_forward, forward_owner, set_forward
from kernels_ext_npu.module_state import has_hooks
from kernels_ext_npu.swaps.decision import Decision, Finder, Swapping, View
from kernels_ext_npu.syntax.residuals import LayerLoop, Sums, find_sums, layer_loop

REPOSITORY = "RMSNorm"
# the layers that the operator can fuse with a sum
_LAYERS = ("RMSNorm", "RMSNormCastLast")
_OWNER, _LOOP_OWNER = "add_norm_fusion", "layer_loop"


@dataclass(eq=False)
class _Loop:
    """Holds the state of one call of a model's forward, as layer follows on layer."""

    behind: dict[nn.Module, nn.Module]  # each layer but the last one -> the one behind it
    running: nn.Module | None = None  # the layer whose forward runs; layers inside it do not count
    normed: tuple[nn.Module, Tensor, Tensor] | None = None  # the norm computed ahead, its input, its output


_running: ContextVar[_Loop | None] = ContextVar("_running", default=None)  # the innermost loop


def put(view: View, decisions: Iterable[Decision], swapping: Swapping) -> None:
    """Bind fused forwards to the layers of a swapped model, and to the models that loop over them."""
    if not registration.uses(REPOSITORY):
        return
    fused = set(view.owned(_OWNER))
    for cls, modules in view.by_class.items():
        if (sums := find_sums(cls.forward)) is None and fused.isdisjoint(modules):
            continue
        for module in modules:
            kernel = None if sums is None else _norm_package(view, module, sums)
            set_forward(module, kernel and _fused_forward(cls.forward, sums, kernel), _OWNER)  # type: ignore[arg-type]
    fused = set(view.owned(_OWNER))
    for _, module in view.named:
        for layers in module._modules.values():
            if type(layers) is nn.ModuleList:
                forward: Any = type(module).forward
                loop = None if fused.isdisjoint(layers) else layer_loop(forward)
                set_forward(module, loop and _forward_with(forward, loop), _LOOP_OWNER)  # type: ignore[arg-type]


def caption(view: View) -> str | None:
    """Say for how many layers of a model sums are computed with their norms; None if for none."""
    counted = Counter(type(module).__name__ for module in view.owned(_OWNER)) if registration.is_active() else {}
    found = ", ".join(f"{count} × {name}" for name, count in counted.items())
    return f"fused add and norm during decoding: {found}" if found else None


def hand_on(layer: nn.Module, x: Tensor) -> None:
    """Pass what was normed for a layer on to the next one, for a layer that inspection skips."""
    loop = _running.get()
    if loop is not None and loop.normed is not None and loop.normed[1] is x:
        norm = _norm_behind(layer, loop)
        loop.normed = None if norm is None else (norm, *loop.normed[1:])


def _norm_package(view: View, module: nn.Module, sums: Sums) -> ModuleType | None:
    """Return the kernel package of a layer's norms; None if none of them is one that can be fused."""
    placed: list[Any] = [view.placed.get(module._modules.get(name)) for name in sums.norms]  # type: ignore[arg-type]
    return next((package for layer, package in filter(None, placed) if layer in _LAYERS), None)


@functools.cache
def _fused_forward(original: FunctionType, sums: Sums, kernel: ModuleType) -> FunctionType:
    """Return a forward that fuses in decoding, and otherwise calls that of the class."""

    def add_norm(layer: nn.Module, norm: nn.Module, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of a sum, and the sum."""
        if step_aside.is_outdated(norm):
            total = residual + x
            return norm(total), total
        return kernel.add_then_norm(norm, x, residual)

    def added(layer: nn.Module, x: Tensor, residual: Tensor) -> Tensor:
        """Return the sum that a layer gives, and keep the norm of it with which the layer behind it begins."""
        loop = _loop_around(layer)
        norm = None if loop is None else _norm_behind(layer, loop)
        if loop is None or norm is None or step_aside.is_outdated(norm) or not kernel.takes_sum(norm, x, residual):
            return residual + x
        normed, total = kernel.add_then_norm(norm, x, residual)
        loop.normed = norm, total, normed
        return total

    together = sums.make(_normed, add_norm, added)

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or not _decodes_one_token(self, args, kwargs):
            return class_forward(self, forward, original)(self, *args, **kwargs)
        loop = _running.get()
        if loop is None or loop.running is not None:
            return together(self, *args, **kwargs)
        loop.running = self
        try:
            return together(self, *args, **kwargs)
        finally:
            loop.running = None

    setattr(forward, MATCHED, original)
    return forward  # type: ignore[return-value]


@functools.cache
def _forward_with(original: FunctionType, found: LayerLoop) -> FunctionType:
    """Return a forward of a model that lets each layer norm for the next one while it runs."""

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or type(self).forward is not original:
            return class_forward(self, forward, original)(self, *args, **kwargs)
        layers = self._modules.get(found.layers)
        is_plain = type(layers) is nn.ModuleList and found.follows(args, kwargs)
        token = _running.set(_Loop(dict(zip(layers, list(layers)[1:]))) if is_plain else None)  # type: ignore
        try:
            return original(self, *args, **kwargs)
        finally:
            _running.reset(token)

    setattr(forward, MATCHED, original)
    return forward  # type: ignore[return-value]


def _decodes_one_token(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Tell whether a layer, whose class is unchanged, decodes one token: its input is ``[B, 1, H]``."""
    given = args[0] if args else kwargs.get("hidden_states")
    return (
        isinstance(given, Tensor)
        and given.dim() == 3
        and given.shape[1] == 1
        and registration.uses(REPOSITORY)
        and not step_aside.is_outdated(layer)
    )


def _normed(layer: nn.Module, norm: nn.Module, x: Tensor) -> Tensor:
    """Compute the first norm of a layer, or return what the layer before has computed of the same input."""
    loop = _loop_around(layer)
    if loop is not None:
        ahead, loop.normed = loop.normed, None
        if ahead is not None and ahead[0] is norm and ahead[1] is x:
            return ahead[2]
    return norm(x)


def _loop_around(layer: nn.Module) -> _Loop | None:
    """Return the loop that called a layer; None if other code did, such as a hook of another layer."""
    loop = _running.get()
    return loop if loop is not None and loop.running is layer else None


def _norm_behind(layer: nn.Module, loop: _Loop) -> nn.Module | None:
    """Return the first norm of the next layer; None if other code may run before it."""
    behind = loop.behind.get(layer)
    if behind is None or not (_is_called_alone(layer) and _is_called_alone(behind)):
        return None
    sums = find_sums(type(behind).forward)
    return None if sums is None or sums.first is None else behind._modules.get(sums.first)


def _is_called_alone(layer: nn.Module) -> bool:
    """Tell whether a call of a layer runs its forward alone: no hooks, no wrapper, no replaced ``__call__``.

    Inspection counts one layer of a kind, with a hook, and lets the others hand on what they are given, by a partial.
    """
    is_handed_on = _is_ours(getattr(vars(layer).get("forward"), "func", None))
    if not is_handed_on and (forward_owner(layer) != _OWNER or step_aside.is_outdated(layer)):
        return False
    hooks = (*layer._forward_hooks.values(), *layer._forward_pre_hooks.values())
    is_watched = has_hooks(layer) and not (hooks and all(map(_is_ours, hooks)))
    return type(layer).__call__ in _calls() and layer._compiled_call_impl is None and not is_watched


@functools.cache
def _calls() -> tuple[Any, ...]:
    """Return the calls of layers, as torch and transformers have them."""
    from transformers.modeling_layers import GradientCheckpointingLayer  # register() need not wait for it

    return nn.Module.__call__, GradientCheckpointingLayer.__call__


def _is_ours(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").startswith(f"{__name__.partition('.')[0]}.")


FINDER = Finder("sums and norms", put=put)
