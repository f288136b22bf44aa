"""Routers by formula: how experts are chosen and weighed, and what of a module is what in it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Gating(NamedTuple):
    """How experts are chosen by their scores, under the names that ``gating_top_k`` of the kernel FusedMoE has."""

    k: int
    scores: str  # of the logits: "softmax" or "sigmoid"
    groups: int = 1
    top_groups: int = 1
    group_scores: str = "best"  # or "two best", whose sum it is
    renormalise: bool = False
    scale: float = 1.0
    epsilon: float = 0.0

    def score(self, logits: Tensor) -> Tensor:
        """Return the scores of all experts, in the dtype of the logits."""
        return logits.softmax(-1) if self.scores == "softmax" else logits.sigmoid()

    def limit(self, choice: Tensor, fill: float = -torch.inf) -> Tensor:
        """Return numbers of which those of other groups than the best are ``fill``."""
        if self.groups == 1:
            return choice
        by_group = choice.unflatten(-1, (self.groups, -1))
        best = by_group.amax(-1) if self.group_scores == "best" else by_group.topk(2).values.sum(-1)
        kept = torch.zeros_like(best).scatter(-1, best.topk(self.top_groups).indices, 1.0)
        return by_group.masked_fill(kept.unsqueeze(-1) == 0, fill).flatten(-2)

    def choose(self, choice: Tensor) -> Tensor:
        """Return the indices of the k largest of some numbers, from the largest on."""
        return self.limit(choice).topk(self.k).indices

    def weigh(self, scores: Tensor, experts: Tensor) -> Tensor:
        """Return the weights of chosen experts."""
        weights = scores.gather(-1, experts)
        if self.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + self.epsilon)
        return weights * self.scale

    def fits(self, experts: int) -> bool:
        """Tell whether so many experts can be chosen of so many."""
        if self.groups == 1:
            return self.k <= experts
        size, rest = divmod(experts, self.groups)
        return not rest and size >= 2 and self.k <= size * self.top_groups


def spread(weights: Tensor, experts: Tensor, like: Tensor) -> Tensor:
    """Return the weights of all experts, ``[T, E]``, which are 0 where they are not chosen."""
    return torch.zeros_like(like, dtype=weights.dtype).scatter(-1, experts.long(), weights)


class Output(NamedTuple):
    """One of the values that a router returns."""

    what: str  # "experts", "weights", these "spread" among 0, "logits", "scores" of all experts, "zero" or "constant"
    is_flat: bool = True  # a row for each token, however these lie
    value: Any = None  # of a constant; of a zero its shape

    @property
    def is_row(self) -> bool:
        """Whether it is one that depends on the tokens."""
        return self.what not in ("zero", "constant")


class Dtypes(NamedTuple):
    """In which dtypes a router computes what it is given in some."""

    x: torch.dtype
    weight: torch.dtype
    product: torch.dtype
    outputs: tuple[torch.dtype | None, ...]


class Router(NamedTuple):
    """A module that gives experts and their weights for each token."""

    gating: Gating  # how it chooses of logits
    weight: str  # the path of the weight of the product that gives these
    is_transposed: bool = False  # whether the weight is ``[H, E]``
    child: str | None = None  # the linear layer that is called for the product, if one is
    bias: str | None = None  # the path of what is added to scores for the choice alone
    offset: str | None = None  # the path of what is added to logits
    outputs: tuple[Output, ...] = ()  # what it returns
    dims: tuple[int, ...] = ()  # how many dimensions its argument may have
    dtypes: tuple[Dtypes, ...] = ()  # those in which it is known to compute
    has_gradient: bool = False  # whether it computes the same where a gradient is asked for, and has the same
    trains: bool = False  # whether it does in training
