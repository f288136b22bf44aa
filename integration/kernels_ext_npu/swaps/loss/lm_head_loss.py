"""Heads of language models whose loss is computed without their logits, while a model is called with labels.

The forward of the model stays: its head returns logits that are computed when somebody looks at them, and cross entropy
of these does not (deferred_logits.py).
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
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from kernels_ext_npu.binding import registration
from kernels_ext_npu.binding.forward_with_labels import forward_with_labels
from kernels_ext_npu.binding.loaded_kernels import class_forward, forward_owner
from kernels_ext_npu.catalogue import HEADS
from kernels_ext_npu.matching import classification
from kernels_ext_npu.swaps import refusals
from kernels_ext_npu.swaps.decision import Decision, Finder, View, bind_forwards
from kernels_ext_npu.swaps.linear.plain_linear import why_not_plain
from kernels_ext_npu.swaps.loss.deferred_logits import defer
from kernels_ext_npu.swaps.loss.gradients import Call
from kernels_ext_npu.swaps.loss.steps import Product

REPOSITORY = "CrossEntropy"
NAME = "linear_cross_entropy"
_OWNER = "loss"
_COMPUTED = "its logits were computed when the model was last called with labels"
_LOSSES = {"loss_function", "CrossEntropyLoss", "cross_entropy"}

_last_calls: weakref.WeakKeyDictionary[nn.Module, Call] = weakref.WeakKeyDictionary()  # by head


def find(view: View) -> Iterator[Decision]:
    """Decide of every head of a language model that computes a loss from labels."""
    for path, head, owner in find_heads(view):
        present = NAME if forward_owner(head) == _OWNER else None
        reason, call = refusal(path, head, owner), _last_calls.get(head)
        looked = None if call is None else call.reason
        doubt = None
        if (call is None or looked) and (own_loss := _own_loss(owner)) is not None:  # what it does a call shows
            doubt = f"its model has a loss_function {own_loss} of its own, which may look at logits"
        make: Any = functools.partial(_make_forward, type(head).forward)  # type: ignore[arg-type]
        yield Decision(path, head, None, reason, present, doubt, kind=HEADS, is_candidate=False, make=make)


def remarks(view: View, served: list[Decision]) -> dict[Decision, str]:
    """Say of heads whose logits were computed all the same why they were."""
    calls = {decision: _last_calls.get(decision.module) for decision in served if decision.present == NAME}
    return {d: f"{_COMPUTED}: {call.reason}" for d, call in calls.items() if call is not None and call.reason}


def find_heads(view: View) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
    """Find the heads of models that compute a loss from labels, with their paths and the innermost of their models."""
    paths = {module: path for path, module in view.named}
    found: dict[nn.Module, PreTrainedModel] = {}
    for model in view.pretrained:
        if "labels" in (names := _names(model)) and names & _LOSSES:
            with suppress(NotImplementedError, AttributeError):
                head = model.get_output_embeddings()
                if isinstance(head, nn.Module) and head in paths:
                    found[head] = model
    return ((paths[head], head, owner) for head, owner in found.items())


def refusal(path: str, head: nn.Module, model: PreTrainedModel) -> str | None:
    """Return why the head of a model cannot defer its logits; None if it can."""
    if path.rpartition(".")[2] not in _names(model):
        return "its head is called by another forward than the one that gets labels"
    return refusals.unwanted(head, REPOSITORY) or refusals.elsewhere(head) or why_not_plain(head, is_sharded=True)


def _own_loss(model: PreTrainedModel) -> str | None:
    """Return the name of the loss that somebody gave a model; None for those of transformers."""
    loss = vars(model).get("_loss_function")
    if loss is None or str(getattr(loss, "__module__", "")).startswith("transformers."):
        return None
    return getattr(loss, "__qualname__", type(loss).__qualname__)


def _make_forward(matched: FunctionType) -> FunctionType:
    return _forward_with(registration.package(REPOSITORY), matched)


@functools.cache
def _forward_with(kernel: ModuleType, matched: FunctionType) -> FunctionType:
    """Return the forward of a head, for a kernel: `forward` by name, by which it is found when a model is unpickled."""

    def forward(self: nn.Module, input: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling() and _can_defer(self, input):
            around = forward_with_labels(sys._getframe(1))
            if around is not None:
                return _deferred(self, input, around.f_locals["self"], kernel)
        return class_forward(self, forward, matched)(self, input)

    return forward  # type: ignore[return-value]


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
