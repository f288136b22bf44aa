"""Heads of language models whose loss is computed without their logits, while a model is called with labels.

The forward of the model stays: its head returns logits that are computed when somebody looks at them, and cross entropy
of these does not (deferred_logits.py). Whether labels were given is read from the variable of that name of the forward
that calls the head.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from kernels_ext_npu.catalogue import HEADS
from kernels_ext_npu.matching import classification
from kernels_ext_npu.patterns.hooks import has_hooks
from kernels_ext_npu.swapping import refusals, state
from kernels_ext_npu.swapping.deferred_logits import defer
from kernels_ext_npu.swapping.devices import is_elsewhere
from kernels_ext_npu.swapping.logits_recipes import Product
from kernels_ext_npu.swapping.own_forwards import OwnForwards, owner_of
from kernels_ext_npu.swapping.plain_linear import FORWARD, PLAIN, name_of
from kernels_ext_npu.swapping.protocol import Row

REPOSITORY = "CrossEntropy"
NAME = "linear_cross_entropy"
OWN_LOSS = "its model has a loss_function "
_CROSS_ENTROPY = {"CrossEntropyLoss", "cross_entropy"}
_LOSSES = {"loss_function", *_CROSS_ENTROPY}
_FRAMES = 16  # of calls between the forward of the model with labels and that of a head

_looked_at: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


class Head(NamedTuple):
    """The head of a language model.

    Attributes:
        path: its name in the model that was looked at.
        module: the head.
        model: whose head it is.
    """

    path: str
    module: nn.Module
    model: PreTrainedModel


def heads_of(model: nn.Module) -> Iterator[Head]:
    """Find the heads of models that compute a loss from labels, each with the innermost of its models."""
    found: dict[nn.Module, Head] = {}
    names = {module: path for path, module in model.named_modules()}
    for module in list(names):
        if isinstance(module, PreTrainedModel) and _computes_a_loss(module):
            with suppress(NotImplementedError, AttributeError):
                head = module.get_output_embeddings()
                if isinstance(head, nn.Module) and head in names:
                    found[head] = Head(names[head], head, module)
    yield from found.values()


def is_swapped(module: nn.Module) -> bool:
    """Tell whether a module is a head that defers its logits."""
    return LAYERS.is_swapped(module)


def refusal(head: Head) -> str | None:
    """Return why a head has to compute its logits; None if it need not."""
    module = head.module
    if module in state.restored:
        return refusals.RESTORED
    if (reason := refusals.left_out(REPOSITORY)) is not None:
        return reason
    if type(module) is not nn.Linear:
        return f"its head is a {name_of(type(module))}: the kernel multiplies with one weight"
    if head.path.rpartition(".")[2] not in classification.names(_forward_of(head.model)):
        return "its head is called by another forward than the one that gets labels"
    if is_elsewhere(module):
        return refusals.elsewhere(module)
    if (loss := vars(head.model).get("_loss_function")) is not None and not _calls_cross_entropy(loss):
        return f"{OWN_LOSS}{getattr(loss, '__qualname__', type(loss).__qualname__)} of its own, which must see logits"
    if "forward" in vars(module) and owner_of(module) is None:
        return "another library has wrapped its forward, and the wrapper must see logits"
    if has_hooks(module):
        return "hooks watch its calls"
    if nn.Linear.forward is not FORWARD:
        return "the forward of all linear layers was replaced, and must see logits"
    if type(module.weight) not in (*PLAIN, Tensor, DTensor):  # FSDP2's weights are plain while the model is called
        return f"its weight is a {name_of(type(module.weight))}: the kernel multiplies with numbers alone"
    if _is_view(module):
        return "its weight is a part of another tensor, as under FSDP1, whose memory may change behind the forward"
    return None


def remark(head: Head) -> str | None:
    """Return why the logits of a head were computed when it was last called with labels; None if they were not."""
    reason = _looked_at.get(head.module)
    return reason and f"its logits were computed when the model was last called with labels: {reason}"


def rows(model: nn.Module) -> Iterator[Row]:
    """Describe every head of a language model that computes a loss from labels."""
    for head in heads_of(model):
        name, reason = type(head.module).__name__, refusal(head)
        if is_swapped(head.module):
            fits, reason = (
                reason is None,
                remark(head) if reason is None else refusals.changed(head.module, reason),
            )
            yield Row(head.path, name, NAME, fits, reason, kind=HEADS.in_models)
        else:
            reason = reason or (refusals.NOT_REGISTERED if state.current is None else refusals.NOT_ASKED_FOR)
            yield Row(head.path, name, None, False, reason, is_candidate=False, kind=HEADS.in_models)


@functools.cache
def _forward_with(kernel: ModuleType) -> FunctionType:
    """Return the forward of a head, for a kernel: `forward` by name, by which it is found when a model is unpickled."""

    def forward(self: nn.Module, input: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and _defers(self, input):
            model = _called_with_labels(sys._getframe(1))
            if model is not None:
                return _deferred(self, input, model, kernel)
        return _called(self, input)

    return forward  # type: ignore[return-value]


def _called(head: Any, hidden_states: Tensor) -> Tensor:
    """Compute logits as the other linear layers of the model are computed."""
    linear = state.loaded_package("Linear")
    if (
        linear is None
        or torch.compiler.is_compiling()
        or type(head) is not nn.Linear
        or nn.Linear.forward is not FORWARD
        or type(head.weight) not in PLAIN
    ):
        return type(head).forward(head, hidden_states)
    return linear.linear(hidden_states, head.weight, head.bias)


def _defers(head: Any, hidden_states: Tensor) -> bool:
    """Tell whether the logits of a call can wait: the weight has to be there until backward, as a tensor of its own."""
    parameters = head._parameters
    if type(head) is not nn.Linear or "weight" not in parameters or "bias" not in parameters:
        return False  # one that was parametrized since is not read here: that would compute its weight
    weight, bias = parameters["weight"], parameters["bias"]
    return (
        type(weight) in PLAIN
        and (bias is None or type(bias) in PLAIN)
        and not _is_view(head)
        and hidden_states.numel() > 0
        and weight.device == hidden_states.device
        and nn.Linear.forward is FORWARD
        and not has_hooks(head)
        and not torch._C._are_functorch_transforms_active()
        and torch.is_grad_enabled()
        and any(each is not None and each.requires_grad for each in (hidden_states, weight, bias))
    )


def _is_view(head: nn.Module) -> bool:
    return hasattr(head.weight, "_fsdp_flattened") or "weight" not in head._parameters


def _called_with_labels(frame: FrameType | None) -> nn.Module | None:
    """Return the model whose forward was given labels, of those that call a head, the innermost first.

    Between them there are calls of torch, and perhaps of who counts modules. Of a model inside another FSDP frees the
    weights before the loss of the outer one.
    """
    for _ in range(_FRAMES):
        if frame is None:
            return None
        if "labels" in frame.f_code.co_varnames:
            model, labels = (frame.f_locals.get(name) for name in ("self", "labels"))
            if not isinstance(model, PreTrainedModel):
                return None
            if isinstance(labels, Tensor):
                return model
            if isinstance(model, FSDPModule):
                return None
        frame = frame.f_back
    return None


def _deferred(head: Any, hidden_states: Tensor, model: nn.Module, kernel: ModuleType) -> Tensor:
    weight, bias, device = head.weight, head.bias, hidden_states.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden_states, weight = hidden_states.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    _looked_at.pop(head, None)
    reference = weakref.ref(head)

    def on_look(reason: str) -> None:
        if (seen := reference()) is not None:
            _looked_at[seen] = reason

    kept = hidden_states.detach(), weight.detach(), None if bias is None else bias.detach()
    if isinstance(model, FSDPModule):  # it frees the weight behind the forward, and fills the same memory later
        kept = kept[0], kept[1].clone(), None if bias is None else bias.detach().clone()
    return defer(Product(hidden_states, weight, bias, kept, kernel), on_look)


def _computes_a_loss(model: nn.Module) -> bool:
    forward = _forward_of(model)
    return "labels" in inspect.signature(forward).parameters and bool(classification.names(forward) & _LOSSES)


def _calls_cross_entropy(loss: Any, depth: int = 4) -> bool:
    """Tell whether a loss calls cross entropy, itself or by functions that it calls."""
    if isinstance(loss, nn.Module):
        return any(isinstance(module, nn.CrossEntropyLoss) for module in loss.modules()) or _calls_cross_entropy(
            type(loss).forward
        )
    function = inspect.unwrap(getattr(loss, "func", getattr(loss, "__func__", loss)))  # of a partial, of a method
    function = function if inspect.isfunction(function) else type(function).__call__
    if not inspect.isfunction(function):
        return False
    used = classification.names(function)
    known = [function.__globals__.get(name) for name in used] + [c.cell_contents for c in function.__closure__ or ()]
    return bool(used & _CROSS_ENTROPY) or (
        depth > 0 and any(inspect.isfunction(each) and _calls_cross_entropy(each, depth - 1) for each in known)
    )


def _forward_of(model: nn.Module) -> FunctionType:
    return inspect.unwrap(type(model).forward)  # type: ignore[return-value]


def _found(model: nn.Module) -> Iterator[tuple[str, nn.Module, str | None]]:
    return ((head.path, head.module, refusal(head)) for head in heads_of(model))


LAYERS = OwnForwards("loss", _found, lambda: _forward_with(state.package(REPOSITORY)))
