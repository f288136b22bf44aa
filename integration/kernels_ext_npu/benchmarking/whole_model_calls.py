"""The calls of a whole model that are measured: its steps, and its head with the loss.

The model has a layer of each kind and its own vocabulary. It gets embedded tokens: looking these up is nobody's kernel,
and the routers know where they stand. A training step goes as far as the gradients; what an optimizer does with them is
nobody's kernel either.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kernels_ext_npu.benchmarking.recorded_calls import Call, Phase
from kernels_ext_npu.benchmarking.shrunk_models import SEED, Model

STEP, HEAD = "step", "CrossEntropy"
KERNELS = (STEP, HEAD)


def wanted(kernels: list[str], phase: Phase) -> list[str]:
    """Return which calls of a whole model there are in a phase, of those that were asked for."""
    return [kernel for kernel in kernels if kernel == STEP or (kernel == HEAD and phase.training)]


def calls(source: Model, model: PreTrainedModel, phase: Phase, kernels: list[str]) -> list[Call]:
    """Make the calls of a whole model in a phase.

    Returns:
        of a prefill and a decode step that which gives logits of the last token, of a training step that which gives
        the loss; and the head's, from hidden states to the loss.
    """
    model.train(phase.training)
    found = []
    inputs = source.hidden_states(phase.batch, phase.tokens, model.dtype)
    if STEP in kernels:
        arguments = dict(_arguments(source, model, phase))
        found.append(Call(STEP, type(model).__name__, "", kwargs={"inputs_embeds": inputs} | arguments))
    if HEAD in kernels:
        head = model.get_output_embeddings()
        path = next(path for path, module in model.named_modules() if module is head)
        arguments = {"hidden_states": inputs.requires_grad_(), "labels": _labels(model, phase)}
        found.append(Call(HEAD, f"{path} and loss", path, kwargs=arguments, of_model=loss_of_head))
    return found


def loss_of_head(self: PreTrainedModel, hidden_states: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of hidden states ``[B, S, H]`` as the forward of a model has it, by what its head is now."""
    logits = self.get_output_embeddings()(hidden_states)
    return self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)


def _arguments(source: Model, model: PreTrainedModel, phase: Phase) -> Iterator[tuple[str, Any]]:
    if phase.training:
        yield "labels", _labels(model, phase)
        yield "use_cache", False
        return
    yield "logits_to_keep", 1
    yield "use_cache", True
    if phase.context:
        context = source.hidden_states(phase.batch, phase.context, model.dtype)
        with torch.no_grad():
            yield "past_key_values", model.base_model(inputs_embeds=context, use_cache=True).past_key_values


def _labels(model: PreTrainedModel, phase: Phase) -> Tensor:
    torch.manual_seed(SEED)
    return torch.randint(model.config.vocab_size, (phase.batch, phase.tokens), device="npu")
