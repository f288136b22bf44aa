"""Routers and experts, with numbers of experts, choices and rows at and around the limits of the operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels_ext_npu.selftest.cases import Function, drawn
from kernels_ext_npu.selftest.functions.norms import gated

TOKENS, HIDDEN, INNER, EXPERTS, CHOICES, GROUPS = 12, 32, 48, 4, 2, 2
COUNTS = torch.tensor([5, 0, 4, 3])


def _product(x: Tensor, weight: Tensor, bias: Tensor, counts: Tensor = COUNTS) -> Tensor:
    return torch.cat([rows @ w + b for rows, w, b in zip(x.split(counts.tolist()), weight, bias)])


def _product_of_list(x: Tensor, *weights: Tensor) -> Tensor:
    return torch.cat([rows @ w.mT for rows, w in zip(x.split(COUNTS.tolist()), weights)])


def _experts(x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    rows = []
    for token, chosen, shares in zip(x, index.tolist(), weights):
        parts = [gated(F.silu)(gate_up[e] @ token) for e in chosen]
        rows.append(sum(share * (down[e] @ part) for e, share, part in zip(chosen, shares, parts)))
    return torch.stack(rows)


def _run_experts(forward: Callable, x: Tensor, index: Tensor, weights: Tensor, *parameters: Tensor) -> Tensor:
    from transformers import Qwen3MoeConfig  # takes as long as all that is above
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS)
    module = Qwen3MoeExperts(config)
    for name, parameter in zip(("gate_up_proj", "down_proj"), parameters):
        delattr(module, name)
        setattr(module, name, parameter)
    return forward(module, x, index, weights)


def _shuffled(tokens: int, experts: int) -> Tensor:
    """Draw an order of all experts for each token."""
    return torch.stack([torch.randperm(experts, generator=torch.Generator().manual_seed(i)) for i in range(tokens)])


def _routed(tokens: int, experts: int, choices: int) -> tuple[Tensor, ...]:
    """Draw tokens, their experts and weights, and weights that keep what goes through them."""
    sizes = (tokens, HIDDEN), (tokens, choices), (experts, 2 * INNER, HIDDEN), (experts, HIDDEN, INNER)
    x, shares, up, down = drawn(*sizes)()
    return x, _shuffled(tokens, experts)[:, :choices], shares, up / HIDDEN**0.5, down / INNER**0.5


def ordered(tokens: int, experts: int) -> Tensor:
    """Make logits that no rounding puts into another order: of the best 16 a quarter apart, all others far below."""
    ranks = _shuffled(tokens, experts)
    return torch.where(ranks < 16, 1.75 - ranks / 4, -8.0)


def _grouped_top_k(logits: Tensor, correction: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """The gating of DeepSeek-V3, token by token."""
    weights, chosen = [], []
    for scores in 1 / (1 + (-logits).exp()):
        merits = dict(enumerate((scores + correction).tolist()))
        size = len(merits) // groups
        parts = [list(merits)[start : start + size] for start in range(0, len(merits), size)]
        best = max(parts, key=lambda group: sum(sorted(merits[e] for e in group)[-2:]))
        chosen.append(sorted(best, key=merits.__getitem__, reverse=True)[:CHOICES])
        weights.append(2.5 * scores[chosen[-1]] / scores[chosen[-1]].sum())
    return torch.stack(weights), torch.tensor(chosen)


def _top_k(logits: Tensor, choices: int) -> Tensor:
    weights, _ = logits.softmax(-1).topk(choices)
    return weights / weights.sum(-1, keepdim=True) if choices > 1 else weights


def _gating(at: str, tokens: int, experts: int, groups: int) -> Function:
    # A row for each choice: the gradient of what is divided by its sum is one of differences between the choices of
    # a token, which neighbours on the ramp of the gradients would lose to rounding.
    return _function(
        "gating_top_k",
        lambda f, *t: tuple(x.mT for x in f(t[0], CHOICES, t[1], groups=groups, scale=2.5)),
        lambda logits, bias: tuple(x.mT for x in _grouped_top_k(logits, bias, groups)),
        lambda: (ordered(tokens, experts), torch.zeros(experts)) if at else (_LOGITS, _CORRECTION),
        at,
    )


def _softmax(at: str, experts: int, choices: int) -> Function:
    arguments = drawn((TOKENS, EXPERTS)) if not at else lambda: (ordered(TOKENS, experts),)
    return _function(
        "softmax_top_k", lambda f, x: f(x, choices, choices > 1)[0], partial(_top_k, choices=choices), arguments, at
    )


_function = partial(Function, "FusedMoE")
# with a bias that reorders them, and none to a tie
_LOGITS = _shuffled(TOKENS, 8) / 2 - 2
_CORRECTION = torch.tensor([-9, -3, 8, 11, -3, 5, 8, -11]) / 32
_STACKED = drawn((TOKENS, HIDDEN), (EXPERTS, HIDDEN, INNER), (EXPERTS, INNER))
_MANY = torch.tensor([0] * 129 + [TOKENS])  # beyond the 128 weights of a list, and one expert has all rows
FUNCTIONS = (
    _function("grouped_matmul", lambda f, x, w, b: f(x, w, COUNTS.to(x.device), b), _product, _STACKED),
    _function(
        "grouped_matmul",
        lambda f, x, w, b: f(x, w, _MANY.to(x.device), b),
        partial(_product, counts=_MANY),
        drawn((TOKENS, HIDDEN), (130, HIDDEN, 8), (130, 8)),
        "130 groups, of which one has rows",
    ),
    _function("GmmFunction", lambda f, x, w, b: f.apply(x, w, COUNTS.to(x.device), b, None), _product, _STACKED),
    _function(
        "HybridGmmFunction",
        lambda f, x, *w: f.apply(x, COUNTS.to(x.device), None, False, *w),
        _product_of_list,
        drawn((TOKENS, HIDDEN), *[(INNER, HIDDEN)] * EXPERTS),
    ),
    _function("fused_experts", lambda f, *t: f(*t), _experts, partial(_routed, TOKENS, EXPERTS, CHOICES)),
    _function("fused_experts", lambda f, *t: f(*t), _experts, partial(_routed, 1, 8, 2), "one token"),
    _function("fused_experts", lambda f, *t: f(*t), _experts, partial(_routed, 7, 130, 3), "130 experts"),
    _function("fused_experts", lambda f, *t: f(*t), _experts, partial(_routed, 5, 8, 8), "all experts chosen"),
    _function("experts_forward", _run_experts, _experts, partial(_routed, TOKENS, EXPERTS, CHOICES)),
    _function(
        "float32_logits", lambda f, x, w: f(x, w), lambda x, w: x @ w.mT, drawn((TOKENS, HIDDEN), (EXPERTS, HIDDEN))
    ),
    _gating("", TOKENS, 8, GROUPS),
    _gating("256 experts in groups", 4, 256, 8),
    _gating("2,048 experts", 2, 2048, 1),
    _gating("2,049 experts", 2, 2049, 1),
    _gating("groups of two", 4, 8, 4),
    _softmax("", EXPERTS, CHOICES),
    _softmax("one choice", 8, 1),
    _softmax("256 experts", 256, 8),
)
