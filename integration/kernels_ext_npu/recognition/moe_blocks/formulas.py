"""What a block with a list of experts computes, and the formulas of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kernels_ext_npu.recognition.module_settings import Settings
from kernels_ext_npu.recognition.routers.formulas import Gating, spread


class Experts(NamedTuple):
    """The experts in a list, all of one class: gated MLPs."""

    name: str  # of the list in the block
    number: int  # how many there are
    width: int  # how many values they take and give for a token
    forward: Any  # of their class
    # what each of them reads; None where a pattern knows their class, and the layer looks at them itself
    settings: Settings | None = None
    # the names of gate, up and down in each; None where they are those that the layer looks for
    projections: tuple[str, ...] | None = None
    activation: nn.Module | None = None  # what the gate goes through; None where it is the ``act_fn`` of each


class Choice(NamedTuple):
    """How a block itself chooses experts by logits."""

    gating: Gating  # how, for how many
    bias: str | None = None  # the name of what is added for the choice alone, ``[E]``; None without
    is_wide: bool = True  # whether scores are computed in float32, and not in the dtype of the logits
    groups: int = 1  # of how many groups each gives as many experts as the others; 1 where they do not count
    gains: str | None = None  # the name of what weights are multiplied by, ``[E]``; None without

    @property
    def has_operator(self) -> bool:
        """Whether the kernel has an operator that chooses so."""
        return self.is_wide and self.groups == 1

    def score(self, logits: Tensor) -> Tensor:
        """Return the scores of all experts, ``[T, E]``."""
        return self.gating.score(logits.float() if self.is_wide else logits)

    def choose(self, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return weights and experts, ``[T, k]``, of logits, ``[T, E]``."""
        scores = self.score(logits)
        merits = (scores if bias is None else scores + bias.flatten()).unflatten(-1, (self.groups, -1))
        chosen = merits.topk(self.gating.k // self.groups).indices
        experts = chosen + torch.arange(self.groups, device=chosen.device).unsqueeze(-1) * merits.shape[-1]
        return self.gating.weigh(scores, experts.flatten(-2)), experts.flatten(-2)


def gained(weights: Tensor, experts: Tensor, gains: Tensor) -> Tensor:
    """Return weights, each multiplied by the gain of its expert."""
    return weights * gains.view(1, -1).expand(len(experts), -1).gather(-1, experts)


def possible_choices(
    top_k: int, number: int, scales: Iterable[float], sizes: Iterable[int], own: str | None
) -> Iterator[Choice]:
    """Yield how a block may choose of so many experts.

    The softmax of the largest logits is that of all, divided by its sum.

    Args:
        top_k: how many it chooses.
        number: of how many.
        scales: that it names, by one of which weights may be multiplied.
        sizes: the whole numbers that it names, of which one may be that of groups.
        own: the name of what it has of one number an expert: a bias or gains.
    """
    groups = (1, *sorted(n for n in sizes if n > 1 and not (number % n or top_k % n)))
    roles = [(None, None), *([(own, None), (None, own)] if own is not None else [])]
    terms = product(groups, ("softmax", "sigmoid"), (False, True), (1.0, *scales), roles, (True, False))
    for count, scores, is_divided, scale, (bias, gains), is_wide in terms:
        yield Choice(Gating(top_k, scores, renormalise=is_divided, scale=scale), bias, is_wide, count, gains)


class Routed(NamedTuple):
    """A part of what a block returns: what its gate gave at a place, as it is or by sequences, ``[B, S, ·]``."""

    place: int
    is_by_sequence: bool


class Balance(NamedTuple):
    """A loss that a block keeps or returns: ``factor · Σ share of tokens · mean score`` over the experts.

    That of Switch Transformers (arXiv:2101.03961, equation 4). A factor of 0 stands for a zero without a gradient.
    """

    factor: float

    def compute(self, choice: Choice, logits: Tensor, experts: Tensor) -> Tensor:
        """Compute it of logits, ``[T, E]``, and the experts that were chosen, ``[T, k]``."""
        scores = choice.score(logits)
        if self.factor == 0:
            return scores.new_zeros(())
        share = spread(torch.ones_like(experts, dtype=torch.float32), experts, scores).mean(0)
        return (share * scores.mean(0)).sum() * self.factor


class Mode(NamedTuple):
    """What a block does in training, or not in training."""

    is_detached: bool  # whether no gradient goes through the experts
    loss: int | None  # where in what the gate returns a loss is, whose gradient is 1 whatever the output is used for
    # what is returned: ``...`` for the output, or a tuple of that, settings, `Routed` and `Balance`
    returned: Any = ...
    # the attributes that it sets and does not read, each to a setting, `Routed` or `Balance`
    written: tuple[tuple[str, Any], ...] = ()


class MoEBlock(NamedTuple):
    """What a block computes: the weighted sum over the experts of each token, and what is added to it."""

    experts: Experts  # the list
    gate: str  # the name of the child that chooses
    gate_settings: Settings | None  # what that reads; None of a linear layer
    takes_rows: bool  # whether it gets ``[T, H]``, and not what the block gets
    widens: bool  # whether it gets float32, whatever the block gets
    casts: bool  # whether autocast around the block is on wherever it calls
    index_at: int | None  # where in what it returns the experts are, ``[T, k]``; None where it returns logits
    weights_at: int | None  # where their weights are
    top_k: int  # how many experts a token has
    choice: Choice | None  # how these follow from logits; None where the gate says them
    shared: tuple[str, ...]  # the paths of experts of all tokens
    shares_rows: bool  # whether these get ``[T, H]``
    shared_gate: str | None  # the name of a projection to one value, whose sigmoid weighs these; None without
    # what it does, by whether it is trained; without an entry it is something else
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
