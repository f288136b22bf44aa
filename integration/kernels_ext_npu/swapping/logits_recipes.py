"""How logits come out of the product of a head: what there is to compute for who looks at them, and for the kernel."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes


@dataclass(frozen=True)
class Product:
    """What logits are computed from.

    Attributes:
        hidden_states: ``[..., H]``.
        weight: ``[V, H]``.
        bias: ``[V]``, or None.
        kept: the same three for who looks, as they stay whatever becomes of the model; they need no gradient.
        kernel: the package that computes the loss.
    """

    hidden_states: Tensor
    weight: Tensor
    bias: Tensor | None
    kept: tuple[Tensor, Tensor, Tensor | None]
    kernel: ModuleType

    def factors(self) -> list[Tensor | None]:
        """Return the three for nodes of autograd that compute the logits."""
        given = self.hidden_states, self.weight, self.bias
        return [None if factor is None else factor.detach() for factor in given]


@dataclass(frozen=True)
class Recipe:
    """How logits come out of a product: for who looks at them, and for the kernel.

    Attributes:
        shape: theirs, ``[..., V]``.
        dtype: theirs.
        functions: what the model made of the logits of the head, one after the other.
        steps: what chose and rearranged their rows, as functions of ``[..., H]``.
        scale: what they were multiplied with, before tanh if that was taken.
        cap: what they were multiplied with after tanh; None without tanh.
        bias: what was added to the logits of the head, ``[V]``; None without.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    functions: tuple[Callable[[Tensor], Tensor], ...] = ()
    steps: tuple[Callable[[Tensor], Tensor], ...] = ()
    scale: float = 1.0
    cap: float | None = None
    bias: Tensor | None = None

    def after(self, product: Product, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recipe | None:
        """Return that of what a method of tensors makes of the logits; None if there is none."""
        if name in ("float", "to"):
            dtype = torch.float32 if name == "float" and not args and not kwargs else _cast(args, kwargs)
            exact = dtype is self.dtype or (dtype is torch.float32 and self.dtype in (torch.float16, torch.bfloat16))
            return replace(self, dtype=dtype) if exact and dtype is not None else None
        if name == "contiguous" and not args and not kwargs:
            return self
        if kwargs:
            return None
        if name == "tanh" and not args:
            return replace(self, cap=1.0) if self.cap is None else None
        if name in ("mul", "multiply", "__mul__", "__rmul__") and _is_factor(args):
            return self._scaled(args[0])
        if name in ("div", "divide", "true_divide", "__truediv__") and _is_factor(args):
            return self._scaled(1 / args[0])
        if name in ("add", "__add__") and product.bias is None and _is_bias(args, self):
            return replace(self, bias=args[0].detach().flatten())
        if name in ("view", "reshape", "flatten", "__getitem__"):
            return _with_rows(self, name, args)
        return None

    def computes_as(self, other: Recipe) -> bool:
        """Tell whether the logits differ in nothing but their rows: they share their memory then."""
        return self.bias is other.bias and (self.dtype, self.scale, self.cap) == (other.dtype, other.scale, other.cap)

    def values(self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the logits, outside of autograd and autocast."""
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
            found = F.linear(hidden_states, weight, bias)
            for function in self.functions:
                found = function(found)
            return found

    def loss(self, product: Product, labels: Tensor, options: dict[str, Any]) -> Tensor:
        """Return the cross entropy of logits ``[N, V]``, without the logits."""
        rows = product.hidden_states
        for step in self.steps:
            rows = step(rows)
        options = {**options, "logit_scale": self.scale * (1 if self.cap is None else self.cap), "softcap": self.cap}
        bias = product.bias if self.bias is None else self.bias
        loss = product.kernel.linear_cross_entropy(rows, product.weight, labels, bias, **options)
        return loss.to(self.dtype)

    def _scaled(self, factor: float) -> Recipe:
        return replace(self, scale=self.scale * factor) if self.cap is None else replace(self, cap=self.cap * factor)


def _with_rows(recipe: Recipe, name: str, args: tuple[Any, ...]) -> Recipe | None:
    """Return the recipe of what a method chooses and rearranges of logits; None if it does not leave rows whole.

    Example: ``logits.view(-1, V)`` of ``[2, 3, V]`` is ``hidden_states.reshape(6, H)``.
    """
    *leading, words = recipe.shape
    chooses = name == "__getitem__"
    if chooses and not all(part in (None, ...) or type(part) in (int, slice) for part in _parts(args[0])):
        return None
    size = math.prod(recipe.shape) + 1 if chooses else words  # no other dimension is as long: the last one stays whole
    with _disable_current_modes():  # a shape is no launch
        found = getattr(torch.empty(*leading, size, dtype=recipe.dtype, device="meta"), name)(*args)
    if found.shape[-1:] != (size,) or found.dtype is not recipe.dtype:
        return None
    leading = found.shape[:-1]
    step = operator.itemgetter(args[0]) if chooses else lambda rows: rows.reshape(*leading, rows.shape[-1])
    return replace(recipe, steps=(*recipe.steps, step), shape=(*leading, words))


def _parts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _cast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """Return the dtype that alone is asked of `to`."""
    given = (*args, *kwargs.values())
    return given[0] if len(given) == 1 and isinstance(given[0], torch.dtype) else None


def _is_factor(args: tuple[Any, ...]) -> bool:
    return len(args) == 1 and type(args[0]) in (int, float) and args[0] != 0


def _is_bias(args: tuple[Any, ...], recipe: Recipe) -> bool:
    """Tell whether a buffer of the model, one number a word, is added to what the head returned."""
    if len(args) != 1 or type(args[0]) is not Tensor or args[0].requires_grad:
        return False
    is_first = recipe.scale == 1 and recipe.cap is None and recipe.bias is None
    words = recipe.shape[-1]
    return is_first and args[0].dtype is recipe.dtype and args[0].numel() == words and args[0].shape[-1:] == (words,)
