"""The calls that are measured: what a model gave its modules and rotary functions while it ran, and its last layer."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from kernels_ext_npu.benchmarking.shrunk_models import SEED, Model
from kernels_ext_npu.catalogue import IMPLEMENTATION, LAYERS
from kernels_ext_npu.matching.function_scan import CalledFunction, called_functions
from kernels_ext_npu.measuring.distance import tensors
from kernels_ext_npu.reporting.report import report
from kernels_ext_npu.transformers_internals import cache_in, cache_parameter

SEQUENCES = 32  # in decoding
STEP, HEAD = "step", "CrossEntropy"  # names of calls that are about whole models
REPOSITORIES = LAYERS | {IMPLEMENTATION: "FlashAttention"}  # by what a report calls a kernel


@dataclass(frozen=True)
class Phase:
    """A way in which a model is used, with the sizes of its inputs."""

    name: str
    batch: int
    tokens: int
    context: int = 0  # tokens that are in the cache already
    training: bool = False

    def __str__(self) -> str:
        after = f" after {self.context}" if self.context else ""
        return f"{self.name}, {self.batch} × {self.tokens}{after}"


def phases(tokens: int) -> list[Phase]:
    """Return what is measured of a model for so many tokens: prefill, decoding and training."""
    return [
        Phase("prefill", 1, tokens),
        Phase("decode", SEQUENCES, 1, context=tokens // 8),
        Phase("training", 1, tokens, training=True),
    ]


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a module, or of a rotary function, with the arguments that the model gave."""

    kernel: str  # the repository of the kernel for it, "layer", or "step" for the whole model
    name: str  # the name of the class or function
    path: str  # the path of the module in the model; of a function ``path.name``, as in a report
    callee: CalledFunction | None = None  # where the function stands in its modeling file; None for a module
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    # takes the model before the arguments; None where the module at the path, or a function, is called
    on_model: Callable[..., Any] | None = None

    def target(self, model: nn.Module) -> Callable:
        """Return what is called, as it stands there now."""
        if self.on_model is not None:
            return partial(self.on_model, model)
        return model.get_submodule(self.path) if self.callee is None else self.callee.function

    def parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Return the parameters of the module that is called, by name; none for a function."""
        return {} if self.callee else dict(model.get_submodule(self.path).named_parameters())

    def arguments(self, dtype: torch.dtype) -> tuple[tuple, dict[str, Any], list[Tensor]]:
        """Make fresh arguments in a dtype: args, kwargs, and those of their tensors that take a gradient."""
        args, kwargs = _copied((self.args, self.kwargs), dtype)
        return args, kwargs, [tensor for tensor in _given(args, kwargs) if tensor.requires_grad]

    def outputs(self, result: Any) -> list[Tensor]:
        """Return the tensors that a call gave.

        Of attention without scores, which eager attention gives unasked; of a model its loss, or its logits.
        """
        if isinstance(result, ModelOutput):
            result = result.get("loss", result.get("logits"))
        if self.kernel == REPOSITORIES[IMPLEMENTATION] and isinstance(result, tuple):
            result = result[0]
        return tensors(result)

    def shapes(self) -> list[list[int]]:
        """Return the shapes of the tensors that it is given; a cache counts for none."""
        return [list(tensor.shape) for tensor in _given(self.args, self.kwargs)]


def record(source: Model, model: PreTrainedModel, phase: Phase, kernels: list[str]) -> list[Call]:
    """Run a model as it is, and return a call of every kind that a kernel serves, and that of the last layer.

    Calls of equal classes with equal shapes are one.
    """
    found: dict[Any, Call] = {}

    def keep(call: Call) -> None:
        found.setdefault((call.kernel, call.name, str(call.shapes())), call)

    base, dtype = model.base_model, model.dtype
    model.train(phase.training)
    context = source.hidden_states(phase.batch, phase.context, dtype) if phase.context else None
    inputs = source.hidden_states(phase.batch, phase.tokens, dtype).requires_grad_(phase.training)
    with torch.set_grad_enabled(phase.training):
        cache = {} if context is None else _filled_cache(base, context)
        with _recording(model, kernels, keep):
            base(inputs_embeds=inputs, **cache, use_cache=bool(phase.context))
    return list(found.values())


@contextmanager
def _recording(model: PreTrainedModel, kernels: list[str], keep: Callable[[Call], None]) -> Iterator[None]:
    """Keep the calls of a model while the context is open, each as it is about to be made."""

    def before(call: Call, _: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
        args, kwargs = _copied((args, kwargs))
        keep(replace(call, args=args, kwargs=kwargs))

    def function(call: Call, original: Callable, *args: Any, **kwargs: Any) -> Any:
        before(call, original, args, kwargs)
        return original(*args, **kwargs)

    with ExitStack() as ends:
        for call in [call for call in find_calls(model) if call.kernel in kernels]:
            if call.callee is None:
                module = model.get_submodule(call.path)
                ends.callback(module.register_forward_pre_hook(partial(before, call), with_kwargs=True).remove)
            else:
                listening = partial(function, call, call.callee.function)
                ends.enter_context(patch.object(sys.modules[call.callee.file], call.callee.name, listening))
        yield


def find_calls(model: PreTrainedModel) -> Iterator[Call]:
    """Find the calls that a kernel may serve, and that of the last layer, without their arguments."""
    found = report(model)
    for row in found:
        # a model that was made without kernels has chosen its attention, and is no candidate for another
        if row.kernel not in REPOSITORIES or not (row.is_candidate or row.kernel == IMPLEMENTATION):
            continue
        callee = None
        if row.function is not None:
            callee = next(
                callee
                for callee in called_functions(type(model.get_submodule(row.module)))
                if callee.name == row.function
            )
        yield Call(REPOSITORIES[row.kernel], row.class_name, row.path, callee)
    count = model.config.num_hidden_layers
    lists = {path: m for path, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count}
    for path, layers in list(lists.items())[:1]:
        yield Call("layer", type(layers[-1]).__name__, f"{path}.{count - 1}")


def _is_cache(value: Any) -> bool:
    return isinstance(value, Cache)


def _given(args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among arguments, without those in caches."""
    return [value for value in tree_leaves((args, kwargs), is_leaf=_is_cache) if isinstance(value, Tensor)]


def _copied(given: Any, dtype: torch.dtype | None = None) -> Any:
    """Copy arguments, in another dtype or theirs: the call, and what comes after it, change no state and keep no graph.

    A cache is copied with its tensors: layers replace theirs when they grow, or write into them.
    """

    def copied(value: Any) -> Any:
        if isinstance(value, Cache):
            fresh = copy.copy(value)
            fresh.layers = [copy.copy(layer) for layer in value.layers]
            for layer in fresh.layers:
                vars(layer).update({name: copied(held) for name, held in vars(layer).items()})
            return fresh
        if not isinstance(value, Tensor):
            return value
        tensor = value.detach()
        if dtype is not None and tensor.is_floating_point() and tensor.dtype.itemsize == 2:
            tensor = tensor.to(dtype)
        return tensor.requires_grad_() if value.requires_grad else tensor.clone()

    return tree_map(copied, given, is_leaf=_is_cache)


def whole_model_calls(source: Model, model: PreTrainedModel, phase: Phase, kernels: list[str]) -> list[Call]:
    """Make the calls of a whole model in a phase: its step, and its head with the loss.

    The model has a layer of each kind and its own vocabulary. It gets embedded tokens: looking these up is nobody's
    kernel, and the routers know where they stand. A training step goes as far as the gradients; what an optimizer does
    with them is nobody's kernel either.

    Returns:
        of a prefill and a decode step that which gives logits of the last token, of a training step that which gives
        the loss; and the head's, from hidden states to the loss.
    """
    model.train(phase.training)
    found = []
    inputs = source.hidden_states(phase.batch, phase.tokens, model.dtype)
    if STEP in kernels:
        arguments = _arguments(source, model, phase)
        found.append(Call(STEP, type(model).__name__, "", kwargs={"inputs_embeds": inputs} | arguments))
    if HEAD in kernels:
        head = model.get_output_embeddings()
        path = next(path for path, module in model.named_modules() if module is head)
        arguments = {"hidden_states": inputs.requires_grad_(), "labels": _labels(model, phase)}
        found.append(Call(HEAD, f"{path} and loss", path, kwargs=arguments, on_model=loss_of_head))
    return found


def loss_of_head(self: PreTrainedModel, hidden_states: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of hidden states ``[B, S, H]`` as the forward of a model has it, by what its head is now."""
    logits = self.get_output_embeddings()(hidden_states)
    return self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)


def _arguments(source: Model, model: PreTrainedModel, phase: Phase) -> dict[str, Any]:
    if phase.training:
        return {"labels": _labels(model, phase), "use_cache": False}
    given: dict[str, Any] = {"logits_to_keep": 1, "use_cache": True}
    if phase.context:
        context = source.hidden_states(phase.batch, phase.context, model.dtype)
        with torch.no_grad():
            given |= _filled_cache(model.base_model, context)
    return given


def _filled_cache(base: nn.Module, context: Tensor) -> dict[str, Cache]:
    """Return the cache of a context ``[B, S, H]``, by the name under which a model takes it."""
    found = cache_in(base(inputs_embeds=context, use_cache=True))
    return {} if found is None else {cache_parameter(base.forward): found[1]}


def _labels(model: PreTrainedModel, phase: Phase) -> Tensor:
    torch.manual_seed(SEED)
    return torch.randint(model.config.vocab_size, (phase.batch, phase.tokens), device="npu")
