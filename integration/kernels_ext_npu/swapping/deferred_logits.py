"""Logits that are computed when somebody looks at them, and a loss that does not.

What a head returns while its model is called with labels is a tensor without memory that knows what it was to be
multiplied from. Between a head and the loss models write a few things, such as

    logits = self.lm_head(hidden_states)                    # [B, S, V]
    logits = torch.tanh(logits / 30.0) * 30.0               # a softcap
    loss = cross_entropy(logits.float().view(-1, V), labels)

Scales, tanh, casts, and what only chooses or rearranges rows are remembered; cross entropy of what was remembered goes
to the kernel, with the same rows of the hidden states. Everything else computes the logits, by the lines that the model
wrote, once, and goes on with them: it finds the tensor that it would have found.

They end with the backward: what somebody still holds when it begins is computed then, and is a tensor like any other,
whatever becomes of the weights. `model(**batch).loss.backward()` holds nothing, and nothing is computed.

They are nodes of autograd: hooks, and code that is not told of subclasses, find tensors that require gradients. The
gradient of the loss takes that way when somebody asks for that of the logits (logits_gradients.py).
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from kernels_ext_npu.swapping.logits_gradients import Follow, Head, PassBy, Same, is_of_an_engine
from kernels_ext_npu.swapping.logits_recipes import Product, Recipe

HELD = "the output was still held when the backward began"

_SHOWN_METHODS = (
    "size dim ndimension numel nelement element_size is_floating_point is_complex is_contiguous stride storage_offset "
    "get_device requires_grad_ __hash__ __len__ is_signed is_conj is_neg is_inference _is_view retain_grad "
    "register_hook"
)
_SHOWN_PROPERTIES = (
    "shape dtype device ndim layout requires_grad grad_fn is_leaf is_sparse is_cuda is_cpu is_npu is_meta is_mkldnn "
    "is_quantized is_nested is_xla is_mps is_xpu itemsize nbytes names output_nr _base __class__ grad retains_grad "
    "_backward_hooks"
)
_SHOWN = {getattr(Tensor, name) for name in _SHOWN_METHODS.split()} | {
    getattr(Tensor, name).__get__
    for name in _SHOWN_PROPERTIES.split()
    if hasattr(getattr(Tensor, name, None), "__get__")
}

_calls: weakref.WeakSet[Call] = weakref.WeakSet()  # of heads, whose logits may not be computed


@dataclass(eq=False)
class Call:
    """A call of a head, and what somebody holds of it.

    Attributes:
        on_look: is told why logits are computed.
        logits: all of the call that nobody has looked at, of which some may be gone.
        is_hooked: whether somebody asked for the gradient of some.
    """

    on_look: Callable[[str], None]
    logits: list[weakref.ref[DeferredLogits]] = field(default_factory=list)
    is_hooked: bool = False

    def __post_init__(self) -> None:
        _calls.add(self)

    def is_asked(self) -> bool:
        """Tell whether somebody waits for the gradient of logits; `backward(inputs=...)` sets `retains_grad`."""
        return self.is_hooked or any(logits.retains_grad for logits in self.held())

    def held(self) -> list[DeferredLogits]:
        """Return the logits of this call that somebody holds."""
        return [found for reference in self.logits if (found := reference()) is not None]

    @staticmethod
    def compute_all_held() -> None:
        """Compute what somebody holds of any call: after a backward weights change."""
        for call in list(_calls):
            _calls.discard(call)
            for logits in call.held():
                logits.look(HELD)


class DeferredLogits(Tensor):
    """Logits that nobody has looked at, or the way to those that somebody has.

    Attributes:
        call: of the head.
        recipe: how they come about.
        product: what they are computed from; None once they are.
        base: the logits whose memory they would share, None for memory of their own, and once they are computed.
        function: makes them of those.
        known: the tensor that they are, once somebody has looked.
        is_changed: whether that was changed in place: it has another node of autograd since.
    """

    call: Call
    recipe: Recipe
    product: Product | None = None
    base: DeferredLogits | None = None
    function: Callable[[Tensor], Tensor]
    known: Tensor | None = None
    is_changed: bool = False

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _SHOWN and not args[0].is_changed:
            if function is Tensor.register_hook and not is_of_an_engine(args[1]):
                args[0].call.is_hooked = True
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        if function in (torch.autograd.grad, torch.autograd.backward):
            return _differentiate(function, args, kwargs)
        if function is F.cross_entropy and "input" in kwargs:
            args = (kwargs.pop("input"), *args)
        if args and isinstance(args[0], DeferredLogits) and args[0].known is None:
            result = _deferred(function, args[0], args[1:], kwargs)
            if result is not None:
                return result
        name = getattr(function, "__name__", str(function))
        looked = tree_map(partial(_looked_at, reason=f"{name} looked at them"), (args, kwargs))
        result = function(*looked[0], **looked[1])
        if _changes_in_place(name, kwargs):
            for tensor in tree_leaves((args[:1], kwargs.get("out"))):
                if isinstance(tensor, DeferredLogits):
                    tensor.is_changed = True
        return result

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Give the values to what runs below autograd, which has nodes of its own for these logits."""
        with torch.no_grad():
            args, kwargs = tree_map(partial(_looked_at, reason=f"{function} looked at them"), (args, kwargs or {}))
            args, kwargs = tree_map(_outside_of_autograd, (args, kwargs))
            return function(*args, **kwargs)

    def look(self, reason: str) -> Tensor:
        """Return the logits, which are computed when this is first called, for a reason."""
        if self.known is None:
            self.call.on_look(reason)
            with torch.inference_mode(False), torch.enable_grad():
                self.known = Same.apply(self, partial(self._compute, reason))
            self.product = self.base = None
        return self.known

    def _compute(self, reason: str) -> Tensor:
        assert self.product is not None
        if self.base is None:
            found = self.recipe.values(*self.product.kept)
        else:
            found = self.function(self.base.look(reason).data)
        return found.data  # the same memory, but no view: torch lets nobody change those in place behind a node of ours


def defer(product: Product, on_look: Callable[[str], None]) -> Tensor:
    """Return the logits of a product, ``[..., V]``, which are not computed yet.

    Args:
        product: what they are computed from.
        on_look: is told why they are computed, if they are.
    """
    given, call = (product.hidden_states, product.weight, product.bias), Call(on_look)
    recipe = Recipe((*given[0].shape[:-1], product.weight.shape[0]), given[0].dtype)
    return _prepared(Head.apply(*given, call, _empty(recipe, product)), call, recipe, product)


def _prepared(logits: DeferredLogits, call: Call, recipe: Recipe, product: Product) -> DeferredLogits:
    logits.call, logits.recipe, logits.product = call, recipe, product
    call.logits.append(weakref.ref(logits))
    return logits


def _empty(recipe: Recipe, product: Product) -> Callable[[], Tensor]:
    """Return what makes a tensor without memory."""
    make: Any = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
    return partial(make, DeferredLogits, recipe.shape, dtype=recipe.dtype, device=product.weight.device)


def _node_of(logits: DeferredLogits, product: Product) -> Tensor:
    """Return what a node of autograd can save in place of logits: it knows their node, and holds nothing else."""
    return Same.apply(logits, _empty(logits.recipe, product))


def _deferred(function: Any, logits: DeferredLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the result of a function without looking at the logits; None if it has to look."""
    recipe, product, name = logits.recipe, logits.product, getattr(function, "__name__", "")
    assert product is not None
    if function is F.cross_entropy:
        loss = _loss(recipe, product, *args, **kwargs)
        if loss is None or not loss.requires_grad:
            return loss
        plain = partial(_call_with, function, args, kwargs)
        return PassBy.apply(loss, _node_of(logits, product), logits.call, plain, recipe.values, *product.factors())
    if function not in (getattr(Tensor, name, None), getattr(torch, name, None)):
        return None
    after = recipe.after(product, name, args, kwargs)
    return None if after is None else _follow(logits, product, partial(_call_with, function, args, kwargs), after)


def _follow(
    logits: DeferredLogits, product: Product, function: Callable[[Tensor], Tensor], after: Recipe
) -> DeferredLogits:
    """Return what a function makes of logits, without looking at them."""
    before = logits.recipe
    after = replace(after, functions=(*before.functions, function))
    is_linear = (before.cap is None) == (after.cap is None)
    given = (None,) if is_linear else (before.values, *product.factors())
    node = Follow.apply(_node_of(logits, product), function, _empty(after, product), *given)
    follower = _prepared(node, logits.call, after, product)
    if before.computes_as(after):
        follower.base, follower.function = logits, function
    return follower


def _call_with(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensor: Tensor) -> Tensor:
    return function(tensor, *args, **kwargs)


def _loss(recipe: Recipe, product: Product, *args: Any, **kwargs: Any) -> Tensor | None:
    """Return the loss, with the arguments of torch.nn.functional.cross_entropy; None where the kernel has it not."""
    given = inspect.signature(F.cross_entropy).bind(None, *args, **kwargs).arguments
    target = given.pop("target")
    options: dict[str, Any] = {
        name: given.pop(name) for name in ("ignore_index", "reduction", "label_smoothing") if name in given
    }
    is_plain = all(value is None for value in given.values()) and len(recipe.shape) == 2
    if not is_plain or target.shape != recipe.shape[:1] or target.is_floating_point():
        return None
    return None if recipe.cap is not None and recipe.cap <= 0 else recipe.loss(product, target, options)


def _differentiate(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what torch.autograd.grad or backward returns: gradients of logits are asked for at their own node."""
    given = inspect.signature(function).bind(*args, **kwargs).arguments
    inputs = given.pop("inputs", None)
    for tensor in tree_leaves(inputs):
        if isinstance(tensor, DeferredLogits):
            tensor.call.is_hooked = True
    given = tree_map(partial(_looked_at, reason="a gradient of theirs was taken"), given)
    inputs = tree_map(lambda value: value.known if getattr(value, "is_changed", False) else value, inputs)
    with torch._C.DisableTorchFunctionSubclass():
        return function(**given, inputs=inputs)


def _changes_in_place(name: str, kwargs: dict[str, Any]) -> bool:
    return (
        "out" in kwargs or name == "__setitem__" or name.startswith("__i") or (name[-1:] == "_" and name[-2:] != "__")
    )


def _looked_at(value: Any, reason: str) -> Any:
    return value.look(reason) if isinstance(value, DeferredLogits) else value


def _outside_of_autograd(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) and value.requires_grad else value
