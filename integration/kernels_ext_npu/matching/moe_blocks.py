"""What a block with a list of experts computes, and the formulas of it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels_ext_npu.matching.module_settings import Settings


class Experts(NamedTuple):
    """The experts in a list, all of one class: gated MLPs.

    Attributes:
        name: of the list in the block.
        number: how many there are.
        width: how many values they take and give for a token.
        settings: what each of them reads; None where a pattern knows their class, and the layer looks at them itself.
        projections: the names of gate, up and down in each; None where they are those that the layer looks for.
        activation: what the gate goes through; None where it is the ``act_fn`` of each.
    """

    name: str
    number: int
    width: int
    settings: Settings | None = None
    projections: tuple[str, ...] | None = None
    activation: nn.Module | None = None


class Score(NamedTuple):
    """How experts and weights follow from logits, ``[T, E]``.

    Attributes:
        is_softmax: or sigmoid.
        is_last: whether it is that of the largest logits, and not the largest of it.
        is_divided: whether the weights are divided by their sum.
        dtype: in which it is computed; None for that of the logits.
        scale: what the weights are multiplied with in the end.
        bias: the name of what is added for the choice alone, ``[E]``; None without.
    """

    is_softmax: bool = True
    is_last: bool = False
    is_divided: bool = False
    dtype: torch.dtype | None = torch.float32
    scale: float = 1.0
    bias: str | None = None

    def choose(self, logits: Tensor, top_k: int, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the weights and the experts of each token, ``[T, k]``, as blocks of transformers do."""
        if self.is_last:
            found, index = logits.topk(top_k, dim=-1)
            weights = self._values(found)
        else:
            values = self._values(logits)
            index = (values if bias is None else values + bias.flatten()).topk(top_k, dim=-1)[1]
            weights = values.gather(-1, index)
        weights = weights / weights.sum(-1, keepdim=True) if self.is_divided else weights
        return (weights if self.scale == 1 else weights * self.scale), index

    def _values(self, logits: Tensor) -> Tensor:
        if self.is_softmax:
            return F.softmax(logits, dim=-1, dtype=self.dtype)
        return torch.sigmoid(logits if self.dtype is None else logits.to(self.dtype))


def possible_scores(scales: Iterable[float], bias: str | None) -> list[Score]:
    """Return the scores that a block may have which names some numbers, and has a bias of its own, or none."""
    terms = product((True, False), (False, True), (False, True), (torch.float32, None), (1.0, *scales), {None, bias})
    found = [Score(*each) for each in terms]
    return [s for s in found if not (s.is_last and (s.bias or (s.is_softmax and s.is_divided)))]  # a sum that is 1


class Routed(NamedTuple):
    """A part of what a block returns: what its gate gave at a place, as it is or by sequences, ``[B, S, ·]``."""

    place: int
    is_by_sequence: bool


class Mode(NamedTuple):
    """What a block does in training, or not in training.

    Attributes:
        is_detached: whether no gradient goes through the experts.
        loss: where in what the gate returns a loss is, whose gradient is 1 whatever the output is used for.
        returned: what is returned: ``...`` for the output, or a tuple of that, settings and `Routed`.
    """

    is_detached: bool
    loss: int | None
    returned: Any = ...


class MoEBlock(NamedTuple):
    """What a block computes: the weighted sum over the experts of each token, and what is added to it.

    Attributes:
        experts: the list.
        gate: the name of the child that chooses.
        gate_settings: what that reads; None of a linear layer.
        takes_rows: whether it gets ``[T, H]``, and not what the block gets.
        index_at: where in what it returns the experts are, ``[T, k]``; None where it returns logits.
        weights_at: where their weights are.
        top_k: how many experts a token has.
        score: how these follow from logits.
        shared: the name of an expert of all tokens, None without; and whether it gets ``[T, H]``.
        shared_gate: the name of a projection to one value, whose sigmoid weighs that; None without.
        modes: what it does, by whether it is trained; without an entry it is something else.
    """

    experts: Experts
    gate: str
    gate_settings: Settings | None
    takes_rows: bool
    index_at: int | None
    weights_at: int | None
    top_k: int
    score: Score | None
    shared: tuple[str, bool] | None
    shared_gate: str | None
    modes: tuple[tuple[bool, Mode], ...]


class AddedLoss(torch.autograd.Function):
    """Gives a tensor back, and a loss the gradient 1, as AddAuxiliaryLoss of DeepSeek's modeling_deepseek.py does."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor) -> Tensor:
        ctx.loss = loss.dtype, loss.device, loss.shape
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        dtype, device, shape = ctx.loss
        return grad, torch.ones(shape, dtype=dtype, device=device)
