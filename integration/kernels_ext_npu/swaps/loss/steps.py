"""The steps of a model between its head and its loss, and how the kernel computes the same without logits.

    logits = torch.tanh(logits / 30.0) * 30.0               # a softcap
    loss = cross_entropy(logits.float().view(-1, V), labels)

are five steps, of which the kernel is told a scale, a softcap, and the rows of the hidden states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

_PRODUCTS = {"mul", "multiply", "__mul__", "__rmul__"}
_QUOTIENTS = {"div", "divide", "true_divide", "__truediv__"}
_SUMS = {"add", "__add__"}
_RESHAPES = {"view", "reshape", "flatten"}
_SWAPS = {"transpose", "swapaxes", "permute"}
_KNOWN = {"float", "to", "contiguous", "tanh", "__getitem__", *_PRODUCTS, *_QUOTIENTS, *_RESHAPES, *_SWAPS}
_PLAIN = {int, float, slice, type(None), type(...), torch.Size}


class Step(NamedTuple):
    """A function of torch that is called with logits first, and with nothing else that needs a gradient."""

    function: Callable
    args: tuple[Any, ...]

    def __call__(self, logits: Tensor) -> Tensor:
        return self.function(logits, *self.args)

    @property
    def name(self) -> str:
        """The name of the function."""
        return getattr(self.function, "__name__", "")

    def is_known(self, logits: Tensor) -> bool:
        """Tell whether it is a known function, whose arguments are numbers, or one bias."""
        if self.function not in (getattr(Tensor, self.name, None), getattr(torch, self.name, None)):
            return False
        if self.name in _SUMS:
            return len(self.args) == 1 and _is_bias(self.args[0], logits)
        kinds = {type(leaf) for leaf in tree_leaves(self.args)}
        return self.name in _KNOWN and kinds <= ({torch.dtype} if self.name == "to" else _PLAIN)

    def adjoint(self, grad: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """Return the gradient of logits of a shape and dtype from that of the result; None where torch finds it."""
        if self.name in _PRODUCTS | _QUOTIENTS:
            return self(grad)
        return None if self.name in {"tanh", "__getitem__", *_SWAPS} else grad.reshape(shape).to(dtype)

    def on_meta(self, logits: Tensor) -> Tensor:
        """Return a tensor without memory that is like the result."""
        with _disable_current_modes():  # it is no launch
            given = torch.empty_strided(logits.shape, logits.stride(), dtype=logits.dtype, device="meta")
            return given + 0 if self.name in _SUMS else self(given)


@dataclass(frozen=True)
class Product:
    """The product that gives the logits of a head: hidden states, weight and bias."""

    hidden_states: Tensor  # ``[..., H]``
    weight: Tensor  # ``[V, H]``
    bias: Tensor | None  # ``[V]``
    detached: tuple[Tensor | None, ...]  # the same three, detached, for computing logits after the model has changed
    kernel: ModuleType  # the package that computes the loss

    def logits(self, steps: Sequence[Step]) -> Tensor:
        """Compute logits, outside of autograd and autocast."""
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(self.weight.device.type, enabled=False):
            found = F.linear(*self.detached)  # type: ignore[arg-type]
            for step in steps:
                found = step(found)
            return found

    def loss(self, steps: Sequence[Step], labels: Tensor, **options: Any) -> Tensor | None:
        """Compute the cross entropy of logits, which steps made, without them; None where that cannot be.

        Logits are ``[N, V]`` with labels ``[N]``, or ``[B, V, ...]`` with labels ``[B, ...]``.
        """
        rows, weight, bias, dtype = self.hidden_states, self.weight, self.bias, self.hidden_states.dtype
        scale, cap, are_words_last = 1.0, None, True
        for step in steps:
            name, (arg, *_) = step.name, (*step.args, None)
            if name in _PRODUCTS | _QUOTIENTS and arg != 0:
                factor = arg if name in _PRODUCTS else 1 / arg
                scale, cap = (scale * factor, None) if cap is None else (scale, cap * factor)
            elif name == "tanh" and cap is None:
                cap = 1.0
            elif name in _SUMS and bias is None and step is steps[0]:
                bias = arg.flatten()
            elif name in ("float", "to") and (arg or torch.float32) in (dtype, torch.float32):
                dtype = arg or torch.float32
            elif name == "contiguous":
                pass
            elif not are_words_last:
                return None
            elif name in _SWAPS and _moves_words(step, rows, weight.shape[0]):
                are_words_last = False
            elif (words := _first_words(step, rows.dim(), weight.shape[0])) is not None:
                weight, bias = weight[:words], None if bias is None else bias[:words]
            elif (found := _remaining_rows(step, rows, weight.shape[0])) is not None:
                rows = found
            else:
                return None
        if (
            (rows.dim() == 2) is not are_words_last
            or labels.shape != rows.shape[:-1]
            or labels.is_floating_point()
            or (cap or 1) <= 0
        ):
            return None
        if torch.is_autocast_enabled(rows.device.type):  # casts what cross entropy gets
            dtype = torch.promote_types(dtype, torch.float32)
        options |= {"logit_scale": scale * (cap or 1), "softcap": cap}
        loss = self.kernel.linear_cross_entropy(rows.flatten(0, -2), weight, labels.flatten(), bias, **options)
        return (loss.view(labels.shape) if loss.dim() else loss).to(dtype)


def _moves_words(step: Step, rows: Tensor, words: int) -> bool:
    """Tell whether a step makes ``[B, V, ...]`` of logits ``[B, ..., V]``."""
    with _disable_current_modes():
        logits = torch.empty(*rows.shape[:-1], words, device="meta")
        moved, expected = step(logits), logits.movedim(-1, 1)
    return (moved.shape, moved.stride()) == (expected.shape, expected.stride())


def _first_words(step: Step, dimensions: int, words: int) -> int | None:
    """Return how many words a step leaves, which drops the last ones of each row, as padding; None for other steps.

    Example: ``logits[..., :50257]`` of a vocabulary of 50,304.
    """
    index = step.args[0] if step.name == "__getitem__" else None
    if not (isinstance(index, tuple) and index and isinstance(index[-1], slice)):
        return None
    *others, last = index
    chosen: Any = range(words)[last]
    is_whole = others in ([...], [slice(None)] * (dimensions - 1))
    return len(chosen) if is_whole and chosen and chosen == range(len(chosen)) else None


def _remaining_rows(step: Step, rows: Tensor, words: int) -> Tensor | None:
    """Return the rows of hidden states whose logits remain after a step; None if rows of logits do not stay whole.

    Example: ``logits.view(-1, V)`` of ``[2, 3, V]`` is ``hidden_states.reshape(6, H)``.
    """
    chooses = step.name == "__getitem__"
    if not (chooses or step.name in _RESHAPES):
        return None
    size = math.prod(rows.shape) + 1 if chooses else words  # no other dimension is as long: the last one stays whole
    with _disable_current_modes():
        shape = step(torch.empty(*rows.shape[:-1], size, device="meta")).shape
    if shape[-1:] != (size,):
        return None
    return rows[step.args[0]] if chooses else rows.reshape(*shape[:-1], rows.shape[-1])


def _is_bias(value: Any, logits: Tensor) -> bool:
    """Tell whether a value is a buffer of the model with a number for each word."""
    words = logits.shape[-1]
    if type(value) is not Tensor or value.requires_grad or value.dtype is not logits.dtype:
        return False
    return value.numel() == words and value.shape[-1:] == (words,) and value.dim() <= logits.dim()
