"""Sums that a layer norms next, in one launch with the norm, where one token is decoded.

A step of decoding costs the host its launches: two thirds of those that only add belong to a norm behind them. The
forward of such layers is written anew (matching/residual_norm_scan.py), and computes where a layer of a swapped model
decodes one token a sequence without gradients; everywhere else that of its class does. Each layer
also norms its own result for the layer behind it, which takes that from the tensor if it is handed the same one.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from kernels_ext_npu.binding import registration, step_aside
from kernels_ext_npu.binding.forward_binding import layer_of, package_of
from kernels_ext_npu.binding.loaded_kernels import MATCHED, owner_of, set_forward
from kernels_ext_npu.matching.residual_norm_scan import Sums, sums_of
from kernels_ext_npu.patterns.hooks import has_hooks
from kernels_ext_npu.swaps.protocol import Swapping

REPOSITORY = "RMSNorm"
# the layers of the kernel that one launch gives together with a sum
_LAYERS = ("RMSNorm", "RMSNormCastLast")
_NORMED = "_kernels_ext_npu_normed"
_OWNER = "add_norm_fusion"

_behind: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()  # of layers


def apply(model: nn.Module, swapping: Swapping) -> None:
    """Let the layers of a swapped model add and norm in one launch."""
    if REPOSITORY not in swapping.registration.kernels:
        return
    for cls, modules in swapping.by_class.items():
        sums = sums_of(cls.forward)
        for module in modules:
            kernel = None if sums is None else _kernel_of(module, sums)
            if kernel is not None or "forward" in vars(module):
                set_forward(module, kernel and _forward_of(cls.forward, sums, kernel), _OWNER)  # type: ignore[arg-type]
    for layers in (m for cls, found in swapping.by_class.items() if issubclass(cls, nn.ModuleList) for m in found):
        for before, behind in zip(layers, list(layers)[1:]):  # type: ignore[call-overload]
            if owner_of(before) == owner_of(behind) == _OWNER:
                _behind[before] = weakref.ref(behind)


def remark(model: nn.Module) -> str | None:
    """Say for how many layers of a model sums are computed with their norms; None if for none."""
    if not registration.is_active():
        return None
    counted = Counter(type(m).__name__ for m in model.modules() if owner_of(m) == _OWNER)
    found = ", ".join(f"{count} × {name}" for name, count in counted.items())
    return f"fused add and norm during decoding: {found}" if found else None


def hand_on(layer: nn.Module, x: Tensor) -> None:
    """Let what was normed for a layer be for the one behind it: the layer is not computed."""
    carried = x.__dict__.get(_NORMED)
    if carried is not None:
        setattr(x, _NORMED, (_norm_behind(layer), *carried[1:]))


def _kernel_of(module: nn.Module, sums: Sums) -> ModuleType | None:
    """Return the package that computes the norms of a layer; None where none of ours can add before."""
    norms = [norm for name in sums.norms if (norm := module._modules.get(name)) is not None]
    return next((package_of(norm) for norm in norms if layer_of(norm) in _LAYERS), None)


@functools.cache
def _forward_of(original: FunctionType, sums: Sums, kernel: ModuleType) -> FunctionType:
    """Return the forward of layers that choose, call by call, where their class has another one."""

    def add_norm(layer: nn.Module, norm: nn.Module, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of a sum, and the sum."""
        if step_aside.steps_aside(norm):
            total = residual + x
            return norm(total), total
        return kernel.add_then_norm(norm, x, residual)

    def added(layer: nn.Module, x: Tensor, residual: Tensor) -> Tensor:
        """Return the sum that a layer gives, and let it carry the norm with which the layer behind it begins.

        Nobody may get the sum in between: what is written through ``.data`` is seen by no version. Nor is anything
        where torch tells of none.
        """
        norm = None if x.is_inference() else _norm_behind(layer)
        if norm is None or step_aside.steps_aside(norm) or not kernel.takes_sum(norm, x, residual):
            return residual + x
        normed, total = kernel.add_then_norm(norm, x, residual)
        setattr(total, _NORMED, (norm, total._version, normed))
        return total

    together = sums.make(_normed, add_norm, added)

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or not _decodes_one_token(self, args, kwargs):
            return type(self).forward(self, *args, **kwargs)
        return together(self, *args, **kwargs)

    setattr(forward, MATCHED, original)
    return forward  # type: ignore[return-value]


def _decodes_one_token(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Tell whether a layer, of the class that it had, is given ``[B, 1, H]``."""
    given = args[0] if args else kwargs.get("hidden_states")
    return (
        isinstance(given, Tensor)
        and given.dim() == 3
        and given.shape[1] == 1
        and registration.uses(REPOSITORY)
        and not step_aside.steps_aside(layer)
    )


def _normed(norm: nn.Module, x: Tensor) -> Tensor:
    """Return the norm with which a layer begins: what the layer before has made, if this is still its result."""
    carried = x.__dict__.pop(_NORMED, None)
    if carried is not None and carried[0] is norm and carried[1] == x._version:
        return carried[2]
    return norm(x)


def _norm_behind(layer: nn.Module) -> nn.Module | None:
    """Return the norm with which the layer behind one begins; None where something else may come first."""
    reference = _behind.get(layer)
    behind = None if reference is None else reference()
    if behind is None or not (_is_called_alone(layer) and _is_called_alone(behind)):
        return None
    sums = sums_of(type(behind).forward)
    return None if sums is None or sums.first is None else behind._modules.get(sums.first)


def _is_called_alone(layer: nn.Module) -> bool:
    """Tell whether a call of a layer is its forward and nothing else, neither before nor behind it.

    Inspection counts one layer of a kind, with a hook, and lets the others hand on what they are given, by a partial.
    """
    is_handed_on = _is_ours(getattr(vars(layer).get("forward"), "func", None))
    hooks = (*layer._forward_hooks.values(), *layer._forward_pre_hooks.values())
    watches = has_hooks(layer) and not (hooks and all(map(_is_ours, hooks)))
    return (is_handed_on or (owner_of(layer) == _OWNER and not step_aside.steps_aside(layer))) and not watches


def _is_ours(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").startswith(f"{__name__.partition('.')[0]}.")
