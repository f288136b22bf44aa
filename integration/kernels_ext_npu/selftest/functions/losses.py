"""Losses of logits and of a head, with vocabularies at and around the pieces that they are computed in."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels_ext_npu.selftest.cases import Function, drawn

ROWS, HIDDEN = 12, 32
# words: pieces end at multiples of 128
VOCABULARIES = {"": 40, "128 words": 128, "257 words": 257, "two words": 2, "50,257 words": 50257}


def labels(words: int) -> Tensor:
    """Draw a label for each row."""
    return torch.randint(words, (ROWS,), generator=torch.Generator().manual_seed(0))


def _head_loss(hidden_states: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(hidden_states @ weight.mT + bias, labels, reduction="none")


def _with_entropy(hidden_states: Tensor, weight: Tensor, *bias: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    log_probs = F.log_softmax(F.linear(hidden_states, weight, *bias), -1)
    return log_probs.gather(-1, labels[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


def _jsd(hidden_states: Tensor, weight: Tensor, bias: Tensor, teacher: Tensor, teacher_weight: Tensor) -> Tensor:
    s = F.log_softmax(hidden_states @ weight.mT + bias, -1)
    t = F.log_softmax((teacher @ teacher_weight.mT).detach(), -1)
    mixture = torch.logaddexp(s, t) - math.log(2)
    return (s.exp() * (s - mixture) + t.exp() * (t - mixture)).sum(-1) / 2


def _functions(at: str, words: int) -> list[Function]:
    chosen, function = labels(words), partial(Function, "CrossEntropy", at=at)
    head = drawn((ROWS, HIDDEN), (words, HIDDEN), (words,))
    head_loss = partial(_head_loss, labels=chosen)
    return [
        function(
            "cross_entropy",
            lambda f, x: f(x, chosen.to(x.device), reduction="none"),
            lambda x: F.cross_entropy(x, chosen, reduction="none"),
            drawn((ROWS, words)),
        ),
        function(
            "linear_cross_entropy",
            lambda f, h, w, b: f(h, w, chosen.to(h.device), b, reduction="none", pieces=2 if at else None),
            head_loss,
            head,
        ),
        function(
            "linear_log_probs",  # without a bias: a head of its own
            lambda f, h, w: f(h, w, chosen.to(h.device)),
            lambda h, w: -head_loss(h, w, h.new_zeros(words)),
            drawn((ROWS, HIDDEN), (words, HIDDEN)),
        ),
        function(
            "linear_log_probs_and_entropy",  # of few words the gradient of a bias is a sum that cancels
            lambda f, h, w, *b: f(h, w, chosen.to(h.device), *b),
            partial(_with_entropy, labels=chosen),
            drawn((ROWS, HIDDEN), (words, HIDDEN)) if at else head,
        ),
        function(
            "linear_generalized_jsd",
            lambda f, h, w, b, t, v: f(h, w, t, v, None, b, reduction="none"),
            _jsd,
            # of larger logits a gradient is mostly rounding, that of the formula in torch, too
            drawn((ROWS, HIDDEN), (words, HIDDEN), (words,), (ROWS, 2 * HIDDEN), (words, 2 * HIDDEN), scale=0.5),
        ),
    ]


FUNCTIONS = tuple(function for at, words in VOCABULARIES.items() for function in _functions(at, words))
