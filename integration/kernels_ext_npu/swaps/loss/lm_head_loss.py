"""Heads of language models whose loss is computed without their logits, by the forward of their model.

That forward stays: its head returns logits that are computed when somebody looks at them, and cross entropy of these
does not (deferred_logits.py). In other people's code a head is the linear layer that a forward calls last, of those
that widen, if it computes a cross entropy itself; a model of transformers has one, and a loss if it is given labels.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import suppress
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.fsdp import FSDPModule

from kernels_ext_npu.binding import registration
from kernels_ext_npu.binding.forward_with_labels import forward_with_labels, frame_running
from kernels_ext_npu.binding.loaded_kernels import class_forward, forward_owner
from kernels_ext_npu.catalogue import HEADS
from kernels_ext_npu.matching import classification
from kernels_ext_npu.swaps import refusals
from kernels_ext_npu.swaps.decision import Decision, Finder, View, bind_forwards
from kernels_ext_npu.swaps.linear.plain_linear import why_not_plain
from kernels_ext_npu.swaps.loss.deferred_logits import defer
from kernels_ext_npu.swaps.loss.gradients import Call
from kernels_ext_npu.swaps.loss.steps import Product
from kernels_ext_npu.syntax.source_tree import instructions

REPOSITORY = "CrossEntropy"
NAME = "linear_cross_entropy"
_OWNER = "loss"
_COMPUTED = "its logits were computed in the last training step"
_CROSS_ENTROPY = {"CrossEntropyLoss", "cross_entropy"}
_LOSSES = {"loss_function", *_CROSS_ENTROPY}

_last_calls: weakref.WeakKeyDictionary[nn.Module, Call] = weakref.WeakKeyDictionary()  # by head


def find(view: View) -> Iterator[Decision]:
    """Decide of every head of a language model that computes a loss from labels."""
    for path, head, owner, caller in find_heads(view):
        present = NAME if forward_owner(head) == _OWNER else None
        reason, call = refusal(path, head, owner, caller), _last_calls.get(head)
        looked = None if call is None else call.reason
        doubt = None
        if (call is None or looked) and (own_loss := _own_loss(owner)) is not None:  # what it does a call shows
            doubt = f"its model has a loss_function {own_loss} of its own, which may look at logits"
        make: Any = functools.partial(_make_forward, type(head).forward, caller)  # type: ignore[arg-type]
        yield Decision(path, head, None, reason, present, doubt, kind=HEADS, is_candidate=False, make=make)


def remarks(view: View, served: list[Decision]) -> dict[Decision, str]:
    """Say of heads whose logits were computed all the same why they were."""
    calls = {decision: _last_calls.get(decision.module) for decision in served if decision.present == NAME}
    return {d: f"{_COMPUTED}: {call.reason}" for d, call in calls.items() if call is not None and call.reason}


class Head(NamedTuple):
    """A head whose model computes a loss."""

    path: str
    module: nn.Module
    owner: nn.Module  # the innermost model that computes the loss
    # the forward that calls the head and computes the loss; None where labels alone tell that a model does
    caller: FunctionType | None = None


def find_heads(view: View) -> list[Head]:
    """Find the heads of models that compute a loss, each with the innermost of its models."""
    paths = {module: path for path, module in view.named}
    found: dict[nn.Module, Head] = {}
    for model in view.pretrained:
        if "labels" in (names := _names(model)) and names & _LOSSES:
            with suppress(NotImplementedError, AttributeError):
                head = model.get_output_embeddings()
                if isinstance(head, nn.Module) and head in paths:
                    found[head] = Head(paths[head], head, model)
    for cls, facts in view.facts.items():
        for owner in view.by_class[cls] if facts.names else ():
            if _computes_loss(owner, facts.names):
                caller: Any = inspect.unwrap(cls.forward)  # type: ignore[arg-type]
                for head in _called_last(caller, owner, facts.names):
                    found[head] = Head(paths[head], head, found[head].owner if head in found else owner, caller)
    return list(found.values())


def _called_last(forward: FunctionType, model: nn.Module, names: AbstractSet[str]) -> list[nn.Linear]:
    """Return the widening layer that a forward names last, with what its methods and functions may call."""
    order = {step.argval: place for place, step in enumerate(instructions(forward.__code__))}  # the last place counts
    layers = [(order.get(name), layer) for name, layer in _widening_layers(model, names)]
    last = max((place for place, _ in layers if place is not None), default=None)
    return [layer for place, layer in layers if place in (last, None)]


def _widening_layers(module: nn.Module, names: AbstractSet[str], listed: str = "") -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers that a forward may call, by the names that it uses, if they give more than they get.

    The logits of others take no more memory than their hidden states. Those of a list have its name.
    """
    for name, child in module._modules.items():
        if child is not None and (listed or name in names):
            called = listed or name
            if not isinstance(child, nn.Linear):
                yield from _widening_layers(child, names, called if isinstance(child, nn.ModuleList) else "")
            # a class of its own may have no sizes
            elif getattr(child, "out_features", 0) > getattr(child, "in_features", 0):
                yield called, child


def _computes_loss(model: nn.Module, names: AbstractSet[str]) -> bool:
    """Tell whether a forward that uses names computes a cross entropy: by a function or class of torch, or a child."""
    children = model._modules.items()
    return not names.isdisjoint(_CROSS_ENTROPY) or any(
        name in names and isinstance(child, nn.CrossEntropyLoss) for name, child in children
    )


def refusal(path: str, head: nn.Module, model: nn.Module, caller: FunctionType | None) -> str | None:
    """Return why the head of a model cannot defer its logits; None if it can."""
    if caller is None and path.rpartition(".")[2] not in _names(model):
        return "its head is called by another forward than the one that gets labels"
    return refusals.unwanted(head, REPOSITORY) or refusals.elsewhere(head) or why_not_plain(head, is_sharded=True)


def _own_loss(model: nn.Module) -> str | None:
    """Return the name of the loss that somebody gave a model; None for those of transformers."""
    loss = vars(model).get("_loss_function")
    if loss is None or str(getattr(loss, "__module__", "")).startswith("transformers."):
        return None
    return getattr(loss, "__qualname__", type(loss).__qualname__)


def _make_forward(matched: FunctionType, caller: FunctionType | None) -> FunctionType:
    return _forward_with(registration.package(REPOSITORY), matched, caller)


@functools.cache
def _forward_with(kernel: ModuleType, matched: FunctionType, caller: FunctionType | None) -> FunctionType:
    """Return the forward of a head, for a kernel: `forward` by name, by which it is found when a model is unpickled."""
    asked = () if caller is None else _learns_from(caller)

    def forward(self: nn.Module, input: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling() and _can_defer(self, input):
            frame = sys._getframe(1)
            around = forward_with_labels(frame)
            if around is None and caller is not None:
                around = frame_running(caller.__code__, frame)
                if around is not None and asked and not any(around.f_locals.get(each) is not None for each in asked):
                    around = None
            if around is not None:
                return _deferred(self, input, around.f_locals[around.f_code.co_varnames[0]], kernel)
        return class_forward(self, forward, matched)(self, input)

    return forward  # type: ignore[return-value]


def _learns_from(caller: FunctionType) -> list[str]:
    """Return the arguments of which a forward wants one to compute a loss: labels, or else all optional ones.

    Without them ``forward(self, x, targets=None)`` gives logits for whoever called it.
    """
    optional = [name for name, each in inspect.signature(caller).parameters.items() if each.default is None]
    return ["labels"] if "labels" in optional else optional


def _can_defer(head: nn.Module, hidden_states: Tensor) -> bool:
    """Tell whether the logits of a call can be deferred: they need a gradient, and nothing transforms the call."""
    if why_not_plain(head) is not None or torch._C._are_functorch_transforms_active():
        return False
    given = [hidden_states, *(tensor for tensor in head._parameters.values() if tensor is not None)]
    return (
        hidden_states.numel() > 0
        and forward_ad._current_level < 0
        and len({tensor.device for tensor in given}) == 1
        and any(tensor.requires_grad for tensor in given)
    )


def _deferred(head: Any, hidden_states: Tensor, model: nn.Module, kernel: ModuleType) -> Tensor:
    """Return deferred logits of a head.

    FSDP frees the weights behind the forward of a model, and fills the same memory later: they are copied.
    """
    weight, bias, device = head.weight, head.bias, hidden_states.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden_states, weight = hidden_states.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    detached = [None if tensor is None else tensor.detach() for tensor in (weight, bias)]
    if isinstance(model, FSDPModule):
        detached = [None if tensor is None else tensor.clone() for tensor in detached]
    logits = defer(Product(hidden_states, weight, bias, (hidden_states.detach(), *detached), kernel))
    _last_calls[head] = logits.call
    return logits


def _names(model: nn.Module) -> AbstractSet[str]:
    """Return the names that the forward of a model uses, those of its parameters among them."""
    forward: Any = inspect.unwrap(type(model).forward)
    return classification.referenced_names(forward) | inspect.signature(forward).parameters.keys()


FINDER = Finder("loss", find, functools.partial(bind_forwards, _OWNER), remarks=remarks)
