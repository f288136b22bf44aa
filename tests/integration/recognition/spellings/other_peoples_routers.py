"""Routers as other people spell them, and what each computes, said token by token."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, EXPERTS = 32, 16


class Rule(NamedTuple):
    """What a router computes.

    Attributes:
        layer: what serves it.
        matrix: the path of its weight, ``[E, H]``.
        k: how many experts it chooses.
        sigmoid: whether its scores are sigmoids.
        bias: the path of what is added for the choice.
        groups: into how many groups experts are divided, of how many they are chosen, and how many of a group's best
            experts are added up to compare it.
        epsilon: what is added to the sum by which weights are divided; None if they are not.
        scale: of the weights.
        places: where in what is returned the experts and the weights are.
        trains: whether it is served in training.
    """

    layer: str
    matrix: str = "weight"
    k: int = 4
    sigmoid: bool = False
    bias: str | None = None
    groups: tuple[int, int, int] | None = None
    epsilon: float | None = None
    scale: float = 1.0
    places: tuple[int, int] = (0, 1)
    trains: bool = True

    def weights(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Compute the weights of all experts in float64, ``[T, E]``, 0 where they are not chosen. Differentiable."""
        held = dict(module.named_parameters()) | dict(module.named_buffers())
        matrix = held[self.matrix].double()
        matrix = matrix if matrix.shape[0] == EXPERTS else matrix.t()
        logits = x.double().reshape(-1, WIDTH) @ matrix.t()
        if (offset := held.get(self.matrix.replace("weight", "bias"))) is not None and "." in self.matrix:
            logits = logits + offset.double()
        rows = []
        for row in logits:
            scores = 1 / (1 + (-row).exp()) if self.sigmoid else row.exp() / row.exp().sum()
            merits = scores.tolist()
            if self.bias is not None:
                merits = [merit + bias for merit, bias in zip(merits, held[self.bias].flatten().tolist())]
            chosen = sorted(self._allowed(merits), key=merits.__getitem__)[-self.k :]
            total = 1.0 if self.epsilon is None else scores[chosen].sum() + self.epsilon
            is_chosen = torch.zeros(EXPERTS, dtype=torch.float64)
            is_chosen[chosen] = 1
            rows.append(self.scale * is_chosen * scores / total)
        return torch.stack(rows)

    def _allowed(self, merits: list[float]) -> list[int]:
        if self.groups is None:
            return list(range(EXPERTS))
        count, top, summed = self.groups
        size = EXPERTS // count
        parts = [range(start, start + size) for start in range(0, EXPERTS, size)]
        parts.sort(key=lambda part: sum(sorted(merits[e] for e in part)[-summed:]))
        return [expert for part in parts[-top:] for expert in part]


class Plain(nn.Module):
    """Has a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH) / 4)


class Dispatcher(Plain):
    """Multiplies by einsum, in float32, and keeps the tokens as they lie."""

    choices = 4

    def forward(self, tokens):
        odds = torch.einsum("...d,ed->...e", tokens.float(), self.weight.float()).softmax(-1)
        best = odds.topk(self.choices, dim=-1)
        return best.indices, best.values / best.values.sum(-1, keepdim=True)


class LightGate(Plain):
    """Rounds all in between to the dtype of the model, and would add a loss in training."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.per_token, self.renorm = 0.1, 4, True

    def forward(self, h):
        batch, length, width = h.shape
        odds = F.linear(h.view(batch * length, width), self.weight, None).softmax(dim=-1)
        gate, chosen = torch.topk(odds, k=self.per_token, dim=-1, sorted=False)
        if self.per_token > 1 and self.renorm:
            gate = gate / (gate.sum(dim=-1, keepdim=True) + 1e-20)
        balance = 0
        if self.training and self.alpha > 0:
            share = F.one_hot(chosen.view(-1), EXPERTS).float().mean(0)
            balance = (odds.mean(0) * share).sum() * EXPERTS * self.alpha
        return chosen, gate, balance


class LightGateWithZero(LightGate):
    """Says of the loss that is not there a tensor."""

    def forward(self, h):
        chosen, gate, balance = super().forward(h)
        return chosen, gate, balance if self.training else gate.new_zeros(1).squeeze()


class QuarterGate(nn.Module):
    """Multiplies in the dtype of the model and keeps weights in float32; how many it chooses its matrix says."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, WIDTH) / 4)

    def forward(self, x, sort=False):
        logits = F.linear(x.reshape(-1, x.shape[-1]), self.weight, None)
        scores = logits.softmax(dim=-1, dtype=torch.float32)
        weight, index = scores.topk(len(self.weight) // 4, dim=-1, sorted=sort)
        return index, weight / weight.sum(dim=-1, keepdim=True), logits


class GroupPicker(nn.Module):
    """Chooses by sigmoid and bias in groups with the best two, and asserts that it is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.conf = SimpleNamespace(parts=4, kept=2, per_tok=4, factor=2.5, kind="sigmoid")
        self.w = nn.Parameter(torch.randn(EXPERTS, WIDTH) / 4)
        self.register_buffer("balance", torch.randn(EXPERTS) / 3)

    def forward(self, x):
        assert not self.training
        b, s, d = x.shape
        p = torch.sigmoid(F.linear(x.reshape(b * s, d).to(torch.float32), self.w.to(torch.float32)))
        merit = (p + self.balance.unsqueeze(0)).view(b * s, self.conf.parts, -1)
        strength = torch.sort(merit, dim=-1, descending=True)[0][..., :2].sum(-1)
        kept = torch.topk(strength, k=self.conf.kept, dim=-1, sorted=False)[1]
        is_out = torch.ones_like(strength, dtype=torch.bool).scatter(1, kept, False)
        merit = torch.where(is_out.unsqueeze(-1), float("-inf"), merit).flatten(1)
        index = torch.topk(merit, self.conf.per_tok, dim=-1, sorted=False)[1]
        w = torch.gather(p, 1, index)
        return index, w / (w.sum(-1, keepdim=True) + 1e-20) * self.conf.factor


class BestGroups(Plain):
    """Chooses by softmax in the groups with the best expert, fills the others with zeros, and scales."""

    n_parts, parts_kept, top_n, factor = 4, 3, 5, 16.0

    def forward(self, x):
        rows = x.view(-1, x.shape[-1])
        p = F.linear(rows.float(), self.weight.float()).softmax(dim=-1, dtype=torch.float32)
        merit = p.view(rows.size(0), self.n_parts, -1).amax(dim=-1)
        kept = merit.topk(self.parts_kept, dim=-1)[1]
        mask = torch.zeros_like(merit).scatter_(1, kept, 1).unsqueeze(-1)
        mask = mask.expand(-1, self.n_parts, EXPERTS // self.n_parts).reshape(rows.size(0), -1)
        weights, index = p.masked_fill(mask == 0, 0.0).topk(self.top_n, dim=-1)
        return weights * self.factor, index


class LaterSoftmax(nn.Module):
    """Chooses logits of a linear layer with a bias first, and takes the softmax of these."""

    def __init__(self, active: int = 3) -> None:
        super().__init__()
        self.scorer = nn.Linear(WIDTH, EXPERTS)
        self.active = active

    def forward(self, x):
        logits = self.scorer(x.reshape(-1, WIDTH))
        values, where = logits.topk(self.active, dim=-1)
        return values.softmax(dim=-1, dtype=torch.float32).type_as(x), where, logits


class One(LaterSoftmax):
    """Chooses one."""

    def __init__(self) -> None:
        super().__init__(1)

    def forward(self, x):
        odds = torch.softmax(self.scorer(x.flatten(0, -2)).float(), dim=-1)
        value, where = odds.max(-1, keepdim=True)
        return where.to(torch.int32), value.to(x.dtype)


class Sorting(nn.Module):
    """Multiplies with a matrix that lies the other way, sorts all, and returns all scores beside the best."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WIDTH, EXPERTS) / 4)
        self.fan_out = 6

    def forward(self, x):
        odds = F.softmax(x.float().view(-1, WIDTH) @ self.table.float(), dim=-1)
        values, order = odds.sort(dim=-1, descending=True)
        values, order = values[:, : self.fan_out], order[:, : self.fan_out]
        return odds, values, order


class SigmoidGate(nn.Linear):
    """Is a linear layer itself, and divides sigmoids by their sum, with an eps of its own."""

    def __init__(self) -> None:
        super().__init__(WIDTH, EXPERTS, bias=False)
        self.k, self.eps = 2, 1e-9

    def forward(self, input):
        logits = super().forward(input.flatten(end_dim=-2))
        share, index = torch.sigmoid(logits.float()).topk(self.k)
        share = share / (share.sum(-1, True) + self.eps)
        return share, index, logits.float(), None


class NarrowGate(Plain):
    """Compares sums of sigmoids that are rounded to the dtype of the model, which no operator does in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(EXPERTS) / 4, requires_grad=False)
        self.topk = 4

    def forward(self, x):
        p = F.linear(x, self.weight).view(-1, EXPERTS).sigmoid()
        index = (p + self.shift).topk(self.topk, dim=-1).indices
        return p.gather(1, index), index


class Undivided(nn.Module):
    """Reads the weight of a layer that it does not call; chooses by softmax and bias, and weighs without it."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.correction = nn.Parameter(torch.randn(1, EXPERTS) / EXPERTS, requires_grad=False)
        self.many, self.gain = 5, 6.0

    def _pick(self, scores):
        with torch.no_grad():
            return torch.topk(scores + self.correction, self.many, dim=-1)[1]

    def forward(self, x):
        scores = F.linear(x.view(-1, WIDTH).float(), self.classes.weight.float()).softmax(-1)
        index = self._pick(scores)
        return scores.gather(1, index) * self.gain, index


class Scattering(Plain):
    """Returns the weights of all experts, 0 of those that are not chosen, as the first gpt-oss of transformers did."""

    top_k = 3

    def forward(self, x):
        logits = F.linear(x.reshape(-1, WIDTH), self.weight)
        share, index = F.softmax(logits, dim=-1, dtype=torch.float32).topk(self.top_k, dim=-1)
        share = (share / share.sum(dim=-1, keepdim=True)).to(logits.dtype)
        return torch.zeros_like(logits).scatter_(1, index, share), logits, index


class Inferring(Plain):
    """Writes over what its gradient would need."""

    def forward(self, x):
        scores = F.linear(x, self.weight).softmax(dim=-1, dtype=torch.float32)
        kept = scores
        by_part = scores.view(x.size(0), 4, 4)
        left = by_part.amax(dim=-1).topk(2, dim=-1)[1]
        out = scores.new_ones(x.size(0), 4, dtype=torch.bool).scatter_(1, left, False)
        scores = by_part.masked_fill_(out.unsqueeze(-1), float("-inf")).flatten(1)
        index = torch.topk(scores, 3, dim=-1)[1]
        weights = kept.gather(1, index)
        weights *= 2.5
        return weights.type_as(x), index


ROUTERS: dict[Callable[[], nn.Module], Rule] = {
    Dispatcher: Rule("SoftmaxTopKRouter", epsilon=0.0),
    LightGate: Rule("SoftmaxTopKRouter", epsilon=0.0, trains=False),
    LightGateWithZero: Rule("SoftmaxTopKRouter", epsilon=0.0, trains=False),
    QuarterGate: Rule("SoftmaxTopKRouter", epsilon=0.0),
    GroupPicker: Rule(
        "SigmoidTopKRouter", "w", 4, True, "balance", groups=(4, 2, 2), epsilon=1e-20, scale=2.5, trains=False
    ),
    BestGroups: Rule("GroupedSoftmaxTopKRouter", k=5, groups=(4, 3, 1), scale=16.0, places=(1, 0)),
    LaterSoftmax: Rule("SoftmaxTopKRouter", "scorer.weight", 3, epsilon=0.0, places=(1, 0)),
    One: Rule("SoftmaxTopKRouter", "scorer.weight", 1),
    Sorting: Rule("SoftmaxTopKRouter", "table", 6, places=(2, 1)),
    SigmoidGate: Rule("SigmoidTopKRouterUnbiased", k=2, sigmoid=True, epsilon=1e-9, places=(1, 0)),
    NarrowGate: Rule("SigmoidTopKRouter", sigmoid=True, bias="shift", places=(1, 0)),
    Undivided: Rule("BiasedSoftmaxTopKRouter", "classes.weight", 5, bias="correction", scale=6.0, places=(1, 0)),
    Scattering: Rule("SoftmaxTopKRouter", k=3, epsilon=0.0, places=(2, 0)),
    Inferring: Rule("GroupedSoftmaxTopKRouter", k=3, groups=(4, 2, 1), scale=2.5, places=(1, 0), trains=False),
}
