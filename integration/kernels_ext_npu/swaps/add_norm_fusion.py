"""Sums that a layer norms next, in one launch with the norm, where one token is decoded.

A step of decoding costs the host its launches: two thirds of those that only add belong to a norm behind them. The
forward of a class of layers is written anew for them (matching/residual_norm_scan.py), and computes where a layer of a
swapped model decodes one token a sequence without gradients; everywhere else the forward is what it was. Each layer
also norms its own result for the layer behind it, which takes that from the tensor if it is handed the same one.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from kernels_ext_npu.binding import loaded_kernels, registration, step_aside
from kernels_ext_npu.binding.forward_binding import kernel_forward, layer_of
from kernels_ext_npu.binding.registration import Registration
from kernels_ext_npu.matching.residual_norm_scan import Sums, sums_of
from kernels_ext_npu.patterns.hooks import has_hooks
from kernels_ext_npu.swaps.protocol import Swapping

REPOSITORY = "RMSNorm"
# the layers of the kernel that one launch gives together with a sum
_LAYERS = ("RMSNorm", "RMSNormCastLast")
_NORMED = "_kernels_ext_npu_normed"

# by the forwards that stand in their places now
_originals: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


@dataclass(eq=False)
class Place:
    """What is known of one layer of a swapped model.

    Attributes:
        kernel: the package that computes its norms.
        sums: those of its forward.
        behind: the layer behind it in the model, whose first norm it computes; None if there is none.
    """

    kernel: ModuleType
    sums: Sums
    behind: weakref.ref[nn.Module] | None = None


def apply(model: nn.Module, swapping: Swapping) -> None:
    """Let the layers of a swapped model add and norm in one launch."""
    active = swapping.registration
    if REPOSITORY not in active.kernels:
        return
    for cls, modules in swapping.by_class.items():
        forward = _below_checkpointing(getattr(cls, "forward", None))
        sums = sums_of(_originals.get(forward, forward)) if isinstance(forward, FunctionType) else None
        for module in modules:
            place = None if sums is None else _place(module, sums)
            if place is None:
                active.sums.pop(module, None)
                continue
            active.sums[module] = place
            _exchange(active, cls)
    for layers in (m for cls, found in swapping.by_class.items() if issubclass(cls, nn.ModuleList) for m in found):
        for before, behind in zip(layers, list(layers)[1:]):  # type: ignore[call-overload]
            if before in active.sums and behind in active.sums:
                active.sums[before].behind = weakref.ref(behind)


def revert(model: nn.Module) -> None:
    """Let the layers of a model add and norm as they did."""
    if registration.current is not None:
        for module in model.modules():
            registration.current.sums.pop(module, None)


def remark(model: nn.Module) -> str | None:
    """Say for how many layers of a model sums are computed with their norms; None if for none."""
    if registration.current is None:
        return None
    counted = Counter(type(m).__name__ for m in model.modules() if m in registration.current.sums)
    found = ", ".join(f"{count} × {name}" for name, count in counted.items())
    return f"fused add and norm during decoding: {found}" if found else None


def hand_on(layer: nn.Module, x: Tensor) -> None:
    """Let what was normed for a layer be for the one behind it: the layer is not computed."""
    kept = x.__dict__.get(_NORMED)
    place = None if registration.current is None else registration.current.sums.get(layer)
    if kept is not None and place is not None and place.behind is not None:
        setattr(x, _NORMED, (_first_norm(place.behind()), *kept[1:]))  # type: ignore[arg-type]


def _place(module: nn.Module, sums: Sums) -> Place | None:
    for name in sums.norms:
        norm = module._modules.get(name)
        if norm is not None and layer_of(norm) in _LAYERS:
            return Place(loaded_kernels.package(kernel_forward(norm)), sums)  # type: ignore[arg-type]
    return None


def _exchange(active: Registration, cls: type) -> None:
    """Let the forward of a class choose, call by call; the class that defines it has it for all that inherit it."""
    owner = next(base for base in cls.__mro__ if "forward" in vars(base))
    outermost: Any = vars(owner)["forward"]
    original: Any = _below_checkpointing(outermost)
    sums = None if original in _originals else sums_of(original)
    if sums is None:
        return
    together = sums.make(_normed, _add_norm, _added)

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or not _decodes_one_token(self, args, kwargs):
            return original(self, *args, **kwargs)
        return together(self, *args, **kwargs)

    _originals[forward] = original
    active.patches.attribute(owner, "forward", forward if original is outermost else _checkpointed(forward))


def _checkpointed(forward: Any) -> Any:
    """Return a forward as a class of layers with checkpointing has it: from transformers 5.23 on these wrap theirs.

    Nothing may lie over what they made: only then do they checkpoint.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer  # register() need not wait for it

    return vars(type("Layer", (GradientCheckpointingLayer,), {"forward": forward}))["forward"]


def _below_checkpointing(forward: Any) -> Any:
    """Return the forward that was written, below what checkpointing has put over it."""
    while getattr(forward, "__code__", None) is _checkpointing():
        forward = forward.__wrapped__
    return forward


def _decodes_one_token(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Tell whether a layer with a place is given ``[B, 1, H]``."""
    given = args[0] if args else kwargs.get("hidden_states")
    return (
        isinstance(given, Tensor)
        and given.dim() == 3
        and given.shape[1] == 1
        and registration.current is not None
        and layer in registration.current.sums
    )


def _add_norm(layer: nn.Module, norm: nn.Module, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norm of a sum, and the sum."""
    if step_aside.steps_aside(norm):
        total = residual + x
        return norm(total), total
    return _place_of(layer).kernel.add_then_norm(norm, x, residual)


def _added(layer: nn.Module, x: Tensor, residual: Tensor) -> Tensor:
    """Return the sum that a layer gives, and let it carry the norm with which the layer behind it begins.

    Nobody may get the sum in between: what is written through ``.data`` is seen by no version. Nor is anything where
    torch tells of none.
    """
    place = _place_of(layer)
    behind = None if place.behind is None else place.behind()
    norm = None if behind is None or not _is_called_alone(layer) else _first_norm(behind)
    if (
        norm is None
        or x.is_inference()
        or step_aside.steps_aside(norm)
        or not place.kernel.takes_sum(norm, x, residual)
    ):
        return residual + x
    normed, total = place.kernel.add_then_norm(norm, x, residual)
    setattr(total, _NORMED, (norm, total._version, normed))
    return total


def _normed(norm: nn.Module, x: Tensor) -> Tensor:
    """Return the norm with which a layer begins: what the layer before has made, if this is still its result."""
    kept = x.__dict__.pop(_NORMED, None)
    if kept is not None and kept[0] is norm and kept[1] == x._version:
        return kept[2]
    return norm(x)


def _first_norm(layer: nn.Module) -> nn.Module | None:
    assert registration.current is not None
    place = registration.current.sums.get(layer)
    if place is None or place.sums.first is None or not _is_called_alone(layer):
        return None
    return layer._modules.get(place.sums.first)


def _is_called_alone(layer: nn.Module) -> bool:
    """Tell whether a call of a layer is its forward and nothing else, neither before nor behind it.

    Inspection counts one layer of a kind, with a hook, and lets the others hand on what they are given, by a partial.
    """
    own = getattr(vars(layer).get("forward"), "func", None)
    hooks = (*layer._forward_hooks.values(), *layer._forward_pre_hooks.values())
    watches = has_hooks(layer) and not (hooks and all(map(_is_ours, hooks)))
    below = _below_checkpointing(type(layer).forward)
    return ("forward" not in vars(layer) or _is_ours(own)) and below in _originals and not watches


def _is_ours(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").startswith(f"{__name__.partition('.')[0]}.")


@functools.cache
def _checkpointing() -> Any:
    """Return the code that checkpointing shows on what it wraps; on this, where it wraps nothing."""
    return _checkpointed(_checkpointing.__wrapped__).__code__


def _place_of(layer: nn.Module) -> Place:
    assert registration.current is not None
    return registration.current.sums[layer]
