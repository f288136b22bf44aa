"""Logits that are computed when somebody looks at them, and a loss that does not.

What a head returns while its model is called with labels is a tensor without memory that knows what it was to be
multiplied from. What models do with it until the loss is remembered (steps.py), and cross entropy of that goes to the
kernel. Everything else computes the logits, by the lines that the model wrote, once, and goes on with them.

They end with the backward: what somebody still holds when it begins is computed then, whatever becomes of the weights.
`model(**batch).loss.backward()` holds nothing, and nothing is computed.

They are nodes of autograd (gradients.py): hooks, and code that is not told of subclasses, find tensors that require
gradients. Below autograd what is computed takes their place.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from kernels_ext_npu.swaps.loss.gradients import Call, Follow, Head, PassBy
from kernels_ext_npu.swaps.loss.steps import Product, Step

# methods that show what a tensor is like and nothing of its values, as all properties do but one
_NAMES = "size dim numel element_size stride is_contiguous is_floating_point __len__ __hash__ retain_grad register_hook"
_SHOW = {getattr(Tensor, name) for name in _NAMES.split()}
# methods that read memory by no operator
_NAMES = "__repr__ __reduce_ex__ __array__ numpy tolist data_ptr storage untyped_storage _typed_storage share_memory_"
_READ_MEMORY = {getattr(Tensor, name) for name in _NAMES.split()}


class DeferredLogits(Tensor):
    """Lazy logits: computed when somebody reads their values."""

    call: Call  # the call of the head that returned them
    product: Product | None  # hidden states and weight; None once they are computed
    steps: tuple[Step, ...] = ()  # what the model applied to the output of the head
    before: DeferredLogits | None = None  # the input of the last step; None once they are computed
    known: Tensor | None = None  # their values, outside of autograd; None while they are not computed
    is_twin: bool = False  # whether they are saved by a node of autograd, and no user has them

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        logits = args[0] if args else kwargs.get("input")
        if function is Tensor.detach and isinstance(logits, DeferredLogits) and logits.is_kept():
            return logits.detach_unseen()
        if isinstance(logits, DeferredLogits) and logits.known is None and torch.is_grad_enabled():
            result = _loss(*args, **kwargs) if function is F.cross_entropy else None
            if not kwargs and (step := Step(function, args[1:])).is_known(logits):
                result = _follow(logits, step)
            if result is not None:
                return result
        is_property = getattr(function, "__name__", "") == "__get__" and function != Tensor.data.__get__  # type: ignore[attr-defined]
        for logits in tree_leaves((args, kwargs)):
            if isinstance(logits, DeferredLogits):
                if _asks_for_a_gradient(function, args):
                    logits.call.is_asked_for = True
                if not (is_property or function in _SHOW):
                    logits.materialize(function)
        if function in _READ_MEMORY:
            args, kwargs = tree_map_only(DeferredLogits, _with_memory, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Compute the logits for what runs below autograd."""
        if function is torch.ops.aten.detach.default and args[0].is_kept():
            return args[0].detach_unseen()
        args, kwargs = tree_map_only(DeferredLogits, lambda logits: logits.materialize(function), (args, kwargs or {}))
        with torch._C._AutoDispatchBelowAutograd():
            return function(*args, **kwargs)

    def is_kept(self) -> bool:
        """Tell whether they are a twin that is not computed: detaching it, as checkpoints do, need not compute it."""
        return self.is_twin and self.known is None

    def detach_unseen(self) -> DeferredLogits:
        """Return a detached copy that is not computed either."""
        made = _maker(self, self.device)()
        vars(made).update(vars(self))
        return made

    def materialize(self, function: Any) -> Tensor:
        """Return the logits outside of autograd, which are computed when a function first looks at them."""
        if self.known is None:
            self.call.materialize(f"{getattr(function, '__name__', function)} looked at them")
        return self.compute()

    def compute(self) -> Tensor:
        """Return the logits outside of autograd, which are computed when this is first called."""
        if self.known is None:
            assert self.product is not None
            if self.before is None:
                self.known = self.product.logits(self.steps)
            else:
                values = self.before.compute()
                with torch.inference_mode(False), torch.no_grad():
                    self.known = self.steps[-1](values)
            self.product = self.before = None
        return self.known


def defer(product: Product) -> DeferredLogits:
    """Return the logits of a product, ``[..., V]``, which are not computed yet."""
    hidden_states, weight, call = product.hidden_states, product.weight, Call()
    with _disable_current_modes():  # it is no launch
        like = torch.empty(*hidden_states.shape[:-1], weight.shape[0], dtype=hidden_states.dtype, device="meta")
    made = Head.apply(hidden_states, weight, product.bias, call, _maker(like, weight.device))
    made.call, made.product = call, product
    call.logits.append(weakref.ref(made))
    return made


def _follow(logits: DeferredLogits, step: Step) -> DeferredLogits:
    """Return what a step makes of logits, without looking at them."""
    product = logits.product  # hooks of saved tensors may look at a twin, and with it at these logits
    twin = _twin(logits) if step.name == "tanh" else None
    make = _maker(step.on_meta(logits), logits.device)
    made = Follow.apply(logits if twin is None else twin, step, make, twin)
    made.call, made.product, made.steps, made.before = logits.call, product, (*logits.steps, step), logits
    made.call.logits.append(weakref.ref(made))
    return made


def _twin(logits: DeferredLogits) -> DeferredLogits:
    """Return a second lazy tensor of the same logits for autograd to save, so that no user's tensor is kept alive."""
    made = Follow.apply(logits, Step(Tensor.contiguous, ()), _maker(logits, logits.device), None)
    made.call, made.product, made.steps, made.is_twin = logits.call, logits.product, logits.steps, True
    return made


def _maker(like: Tensor, device: torch.device) -> Callable[[], DeferredLogits]:
    """Return what makes a tensor without memory."""
    make: Any = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
    return partial(make, DeferredLogits, like.shape, strides=like.stride(), dtype=like.dtype, device=device)


def _loss(
    input: DeferredLogits, target: Tensor, *, weight: Any, size_average: Any, reduce: Any, **options: Any
) -> Tensor | None:
    """Return what torch.nn.functional.cross_entropy makes of logits, without them; None where the kernel has it not."""
    if not (weight is size_average is reduce is None):
        return None
    assert input.product is not None  # they are not computed
    loss = input.product.loss(input.steps, target, **options)
    if loss is None or not loss.requires_grad:
        return loss
    return PassBy.apply(loss, _twin(input), partial(F.cross_entropy, target=target, **options), input.call)


def _asks_for_a_gradient(function: Any, args: tuple[Any, ...]) -> bool:
    """Tell whether a function asks for the gradient of logits.

    The hooks of FSDP do not: they gather weights when a gradient arrives, whatever it is.
    """
    if function is Tensor.register_hook:
        return not str(getattr(args[-1], "__module__", "")).startswith("torch.distributed.")
    return function in (torch.autograd.grad, torch.autograd.backward)


def _with_memory(logits: DeferredLogits) -> Tensor:
    return logits.compute().detach().requires_grad_(logits.requires_grad)
