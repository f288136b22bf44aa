"""Logits that are computed when somebody looks at them, and a loss that does not.

What a head returns while its model is called with labels is a tensor without memory that knows what it was to be
multiplied from. Between a head and the loss models write a few things, such as

    logits = self.lm_head(hidden_states)                    # [B, S, V]
    logits = torch.tanh(logits / 30.0) * 30.0               # a softcap
    loss = cross_entropy(logits.float().view(-1, V), labels)

Scales, tanh, casts, and what only chooses or rearranges rows are remembered; cross entropy of what was remembered goes
to the kernel, with the same rows of the hidden states. Everything else computes the logits, by the lines that the model
wrote, once, and goes on with them: it finds the tensor that it would have found. So does whoever changes them in place.

It is a node of autograd: hooks, and code that is not told of subclasses, find a tensor that requires gradients, with
a backward of its own. The gradient of the loss takes that way when somebody asks for that of the logits
(logits_gradients.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from kernels_ext_npu.swapping import optimizer_steps
from kernels_ext_npu.swapping.logits_gradients import PassBy, gradient_of, is_of_an_engine
from kernels_ext_npu.swapping.row_steps import Step, step_of

CHANGED = (
    "these logits were not computed when the model was called, and what they are computed from has changed since: look "
    "at them before the weights change, or leave the kernel CrossEntropy out: register(kernels=...)"
)
NOT_KEPT = (
    "the gradient of these logits is not computed at one place, since they were scaled, capped or rearranged without "
    "being computed: leave the kernel CrossEntropy out: register(kernels=...)"
)
IN_PLACE = "these logits were changed in place, and the loss is that of what they were: ask for their gradient before"

_SHOWN_METHODS = (
    "size dim ndimension numel nelement element_size is_floating_point is_complex is_contiguous stride storage_offset "
    "get_device requires_grad_ __hash__ __len__ is_signed is_conj is_neg is_inference _is_view"
)
_SHOWN_PROPERTIES = (
    "shape dtype device ndim layout requires_grad grad_fn is_leaf is_sparse is_cuda is_cpu is_npu is_meta is_mkldnn "
    "is_quantized is_nested is_xla is_mps is_xpu itemsize nbytes names output_nr _base __class__"
)
_SHOWN = {getattr(Tensor, name) for name in _SHOWN_METHODS.split()} | {
    getattr(Tensor, name).__get__
    for name in _SHOWN_PROPERTIES.split()
    if hasattr(getattr(Tensor, name, None), "__get__")
}
_ASKED = {Tensor.retain_grad, Tensor.register_hook}
_OF_GRADIENTS = _ASKED | {getattr(Tensor, name).__get__ for name in ("grad", "retains_grad", "_backward_hooks")}


@dataclass(eq=False)
class Product:
    """What logits are to be computed from, as it was when the head was called.

    Attributes:
        hidden_states: ``[..., H]``.
        weight: ``[V, H]``.
        bias: ``[V]``, or None.
        kernel: the package that computes the loss.
        on_look: is told the name of the function for which the logits are computed.
        is_over: whether the weight is known to have changed.
    """

    hidden_states: Tensor
    weight: Tensor
    bias: Tensor | None
    kernel: ModuleType
    on_look: Callable[[str], None]
    is_over: bool = False

    def __post_init__(self) -> None:
        self._state = self._look_at_state()
        optimizer_steps.watch(self, self.weight, Product.end)

    def end(self) -> None:
        """Compute nothing from now on: the weight is another one."""
        self.is_over = True

    def logits(self) -> Tensor:
        """Compute the logits, outside of autograd.

        Raises:
            RuntimeError: a tensor has changed since, or its memory is gone.
        """
        self.check()
        with torch.no_grad():
            return F.linear(self.hidden_states, self.weight, self.bias)

    def check(self) -> None:
        """Raise if a tensor has changed since, or its memory is gone."""
        if self.is_over or self._look_at_state() != self._state:
            raise RuntimeError(CHANGED)

    def _look_at_state(self) -> list[tuple[Any, ...]]:
        return [_state_of(t) for t in (self.hidden_states, self.weight, self.bias) if t is not None]


@dataclass(frozen=True)
class Recipe:
    """How logits came out of a product: what the kernel has to do to give their loss.

    Attributes:
        product: what they are computed from.
        shape: theirs, ``[..., V]``.
        dtype: theirs.
        steps: what chose and rearranged their rows, as functions of ``[..., H]``.
        scale: what they were multiplied with, before tanh if that was taken.
        cap: what they were multiplied with after tanh; None without tanh.
    """

    product: Product
    shape: tuple[int, ...]
    dtype: torch.dtype
    steps: tuple[Step, ...] = ()
    scale: float = 1.0
    cap: float | None = None

    def scaled(self, factor: float) -> Recipe:
        """Return that of the logits times a number."""
        return replace(self, scale=self.scale * factor) if self.cap is None else replace(self, cap=self.cap * factor)

    def loss(self, labels: Tensor, options: dict[str, Any]) -> Tensor:
        """Return the cross entropy of logits ``[N, V]``, without the logits."""
        product, rows = self.product, self.product.hidden_states
        product.check()
        for step in self.steps:
            rows = step(rows)
        options = {**options, "logit_scale": self.scale * (1 if self.cap is None else self.cap), "softcap": self.cap}
        loss = product.kernel.linear_cross_entropy(rows, product.weight, labels, product.bias, **options)
        return loss.to(self.dtype)


class DeferredLogits(Tensor):
    """Logits that nobody has looked at.

    Attributes:
        recipe: how they come about.
        compute: computes them.
        known: the tensor that they are, once somebody has looked.
        version: that of the known tensor, before anybody changed it in place.
        parent: what they were made of without looking; None for what the head returned.
        followers: what was made of them without looking.
    """

    recipe: Recipe
    compute: Callable[[str], Tensor]
    known: Tensor | None
    version: int
    parent: DeferredLogits | None
    followers: list[weakref.ref[DeferredLogits]]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _ASKED and args[0].parent is not None and not is_of_an_engine(args[-1]):
            raise RuntimeError(NOT_KEPT)
        if function in _SHOWN or (function in _OF_GRADIENTS and not args[0].is_changed()):
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        if function is torch.autograd.grad:
            return _grad(*args, **kwargs)
        if function is F.cross_entropy and "input" in kwargs:
            args = (kwargs.pop("input"), *args)
        if args and isinstance(args[0], DeferredLogits) and args[0].known is None:
            result = _deferred(function, args[0], args[1:], kwargs)
            if result is not None:
                return result
        name = getattr(function, "__name__", str(function))
        if _changes_in_place(name, kwargs):
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, DeferredLogits):
                    tensor.settle()
        args, kwargs = tree_map(lambda value: _looked_at(value, name), (args, kwargs))
        return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Give the values to what runs below autograd, which has nodes of its own for these logits."""
        with torch.no_grad():
            args, kwargs = tree_map(lambda value: _looked_at(value, str(function)), (args, kwargs or {}))
            args, kwargs = tree_map(_outside_of_autograd, (args, kwargs))
            return function(*args, **kwargs)

    def look(self, name: str = "the model") -> Tensor:
        """Return the logits, which are computed when this is first called.

        Args:
            name: of the function that they are computed for.
        """
        if self.known is None:
            with torch.set_grad_enabled(self.requires_grad):
                self.known = self.compute(name)
            self.version = self.known._version
        return self.known

    def is_changed(self) -> bool:
        """Tell whether somebody looked at the logits, and changed them in place."""
        return self.known is not None and self.known._version != self.version

    def unchanged(self) -> Tensor:
        """Return the logits as the model computes them.

        Raises:
            RuntimeError: somebody has changed them in place.
        """
        logits = self.look("the gradient of logits")
        if self.is_changed():
            raise RuntimeError(IN_PLACE)
        return logits

    def settle(self) -> None:
        """Compute what was made of these logits, before they change in place."""
        for follower in [found for reference in self.followers if (found := reference()) is not None]:
            follower.look()
            follower.settle()


def defer(product: Product) -> Tensor:
    """Return the logits of a product, ``[..., V]``, which are not computed yet."""
    shape = (*product.hidden_states.shape[:-1], product.weight.shape[0])
    logits = _Head.apply(product.hidden_states, product.weight, product.bias, shape)
    recipe = Recipe(product, shape, product.hidden_states.dtype)
    reference = weakref.ref(logits)

    def compute(name: str) -> Tensor:
        product.on_look(name)
        return _Look.apply(reference(), product)

    return _prepared(logits, recipe, compute, None)


def _follow(logits: DeferredLogits, function: Callable[[Tensor], Tensor], recipe: Recipe) -> DeferredLogits:
    """Return what a function makes of logits, without looking at them."""
    result = _Follow.apply(logits, function, recipe)
    follower = _prepared(result, recipe, lambda name: function(logits.look(name)), logits)
    logits.followers.append(weakref.ref(follower))
    return follower


def _prepared(
    logits: DeferredLogits, recipe: Recipe, compute: Callable[[str], Tensor], parent: DeferredLogits | None
) -> DeferredLogits:
    logits.recipe, logits.compute, logits.parent = recipe, compute, parent
    logits.known, logits.version, logits.followers = None, 0, []
    return logits


class _Head(torch.autograd.Function):
    """The node of the logits of a head."""

    @staticmethod
    def forward(
        ctx, hidden_states: Tensor, weight: Tensor, bias: Tensor | None, shape: tuple[int, ...]
    ) -> DeferredLogits:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_states, weight)
        return _without_memory(shape, hidden_states.dtype, hidden_states.device)

    @staticmethod
    def backward(ctx, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None
        hidden_states, weight = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias, _ = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            grad @ weight if needs_hidden else None,
            rows.t() @ hidden_states.reshape(-1, hidden_states.shape[-1]) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
            None,
        )


class _Look(torch.autograd.Function):
    """The node between the logits of a head and the same in memory."""

    @staticmethod
    def forward(ctx, logits: DeferredLogits, product: Product) -> Tensor:
        return product.logits()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Follow(torch.autograd.Function):
    """The node of what is made of logits, for who takes it without asking for its values."""

    @staticmethod
    def forward(ctx, logits: DeferredLogits, function: Callable[[Tensor], Tensor], recipe: Recipe) -> DeferredLogits:
        ctx.set_materialize_grads(False)
        ctx.logits, ctx.function = logits, function
        return _without_memory(recipe.shape, recipe.dtype, logits.device)

    @staticmethod
    def backward(ctx, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        if grad is None:
            return None, None, None
        return gradient_of(ctx.function, ctx.logits, grad), None, None


def _without_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> DeferredLogits:
    return Tensor._make_wrapper_subclass(DeferredLogits, shape, dtype=dtype, device=device)  # type: ignore[attr-defined]


def _deferred(function: Any, logits: DeferredLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the result of a function without looking at the logits; None if it has to look."""
    recipe, name = logits.recipe, getattr(function, "__name__", "")
    if function is F.cross_entropy:
        loss = _loss(recipe, *args, **kwargs)
        if loss is None or not loss.requires_grad:
            return loss
        return PassBy.apply(loss, logits, lambda tensor: F.cross_entropy(tensor, *args, **kwargs))
    if function not in (getattr(Tensor, name, None), getattr(torch, name, None)):
        return None
    after = _after(recipe, name, args, kwargs)
    return None if after is None else _follow(logits, lambda tensor: function(tensor, *args, **kwargs), after)


def _after(recipe: Recipe, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recipe | None:
    """Return the recipe of what a function of torch makes of logits; None if there is none."""
    if name in ("float", "to"):
        dtype = torch.float32 if name == "float" and not args and not kwargs else _cast(args, kwargs)
        exact = dtype is recipe.dtype or (dtype is torch.float32 and recipe.dtype in (torch.float16, torch.bfloat16))
        return replace(recipe, dtype=dtype) if exact and dtype is not None else None
    if name == "contiguous" and not args and not kwargs:
        return recipe
    if kwargs:
        return None
    if name == "tanh" and not args:
        return replace(recipe, cap=1.0) if recipe.cap is None else None
    if name in ("mul", "multiply", "__mul__", "__rmul__") and _is_factor(args):
        return recipe.scaled(args[0])
    if name in ("div", "divide", "true_divide", "__truediv__") and _is_factor(args):
        return recipe.scaled(1 / args[0])
    if name in ("view", "reshape", "flatten", "__getitem__"):
        found = step_of(name, recipe.shape, args)
        return found and replace(recipe, steps=(*recipe.steps, found[0]), shape=found[1])
    return None


def _loss(
    recipe: Recipe,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Return the loss, with the arguments of torch.nn.functional.cross_entropy; None where the kernel has it not."""
    is_plain = weight is None and size_average is None and reduce is None and len(recipe.shape) == 2
    if not is_plain or target.shape != recipe.shape[:1] or target.is_floating_point():
        return None
    if recipe.cap is not None and recipe.cap <= 0:
        return None
    options = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    return recipe.loss(target, options)


def _grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the gradients that torch.autograd.grad returns, those of logits at their own node."""
    for tensor in tree_leaves(inputs):
        if isinstance(tensor, DeferredLogits) and tensor.parent is not None and tensor.known is not None:
            raise RuntimeError(NOT_KEPT)
    outputs = tree_map(lambda value: _looked_at(value, "grad"), outputs)
    args, kwargs = tree_map(lambda value: _looked_at(value, "grad"), (args, kwargs))
    inputs = tree_map(lambda value: value.known if _is_changed(value) else value, inputs)
    with torch._C.DisableTorchFunctionSubclass():
        return torch.autograd.grad(outputs, inputs, *args, **kwargs)


def _is_changed(value: Any) -> bool:
    return isinstance(value, DeferredLogits) and value.is_changed()


def _cast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """Return the dtype that alone is asked of `to`."""
    given = (*args, *kwargs.values())
    return given[0] if len(given) == 1 and isinstance(given[0], torch.dtype) else None


def _is_factor(args: tuple[Any, ...]) -> bool:
    return len(args) == 1 and type(args[0]) in (int, float) and args[0] != 0


def _changes_in_place(name: str, kwargs: dict[str, Any]) -> bool:
    return (
        "out" in kwargs or name == "__setitem__" or name.startswith("__i") or (name[-1:] == "_" and name[-2:] != "__")
    )


def _looked_at(value: Any, name: str) -> Any:
    return value.look(name) if isinstance(value, DeferredLogits) else value


def _outside_of_autograd(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) and value.requires_grad else value


def _state_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return what changes when a tensor is written to, or its memory is exchanged or freed."""
    if type(tensor) not in (Tensor, torch.nn.Parameter):  # a fake tensor has no memory
        return (tensor._version,)
    return tensor._version, tensor.data_ptr(), tensor.untyped_storage().nbytes()
