"""Blocks that look as if they sent tokens to experts and summed what these give, and do something else."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.integration.recognition.spellings.other_peoples_moe_blocks import CHOSEN, EXPERTS, WIDTH, Chooser, Expert

LOADS: list[torch.Size] = []


class Like(nn.Module):
    """A block that is served, of which each lookalike changes one step."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def route(self, x):
        weights, chosen = F.softmax(self.gate(x), -1, dtype=torch.float32).topk(CHOSEN, -1)
        return weights.to(x.dtype), chosen

    def expert(self, number, x, weights):
        return self.experts[number](x) * weights

    def add(self, y, rows, part):
        return y.index_add(0, rows, part)

    def end(self, y, x):
        return y

    def forward(self, x):
        flat = x.reshape(-1, WIDTH)
        weights, chosen = self.route(flat)
        y = torch.zeros_like(flat)
        for number in range(EXPERTS):
            rows, places = torch.where(chosen == number)
            y = self.add(y, rows, self.expert(number, flat[rows], weights[rows, places, None]))
        return self.end(y, flat).view(x.shape)


class ProjectingMoE(Like):
    """Computes what the block does, of a list of projections of each kind, and of no list of experts."""

    def __init__(self) -> None:
        super().__init__()
        del self.experts
        self.gates, self.ups = (nn.ModuleList(nn.Linear(WIDTH, 8) for _ in range(EXPERTS)) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(8, WIDTH) for _ in range(EXPERTS))

    def expert(self, number, x, weights):
        return self.downs[number](F.silu(self.gates[number](x)) * self.ups[number](x)) * weights


class GroupsOfOthers(Like):
    """Chooses an expert of each of two groups, and gives those of the other group their weights."""

    def route(self, x):
        weights, chosen = F.softmax(self.gate(x), -1, dtype=torch.float32).view(len(x), 2, -1).topk(1, -1)
        chosen = chosen + torch.arange(0, EXPERTS, EXPERTS // 2, device=x.device)[:, None]
        return weights.flip(1).flatten(1).to(x.dtype), chosen.flatten(1)


class GainsAhead(Like):
    """Chooses by what its gains have been multiplied with, so that they are no gains of weights alone."""

    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.Parameter(torch.linspace(0.5, 1.5, EXPERTS))

    def route(self, x):
        weights, chosen = (F.softmax(self.gate(x), -1, dtype=torch.float32) * self.gains).topk(CHOSEN, -1)
        return weights.to(x.dtype), chosen


class DetachesGains(Like):
    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.Parameter(torch.linspace(0.5, 1.5, EXPERTS))

    def route(self, x):
        weights, chosen = F.softmax(self.gate(x), -1, dtype=torch.float32).topk(CHOSEN, -1)
        return (weights * self.gains.detach()[chosen]).to(x.dtype), chosen


class WeighsBefore(Like):
    def expert(self, number, x, weights):
        return self.experts[number](x * weights)


class SquaresWeights(Like):
    def expert(self, number, x, weights):
        return self.experts[number](x) * weights**2


class DetachesWeights(Like):
    def expert(self, number, x, weights):
        return self.experts[number](x) * weights.detach()


class DetachesTokens(Like):
    def expert(self, number, x, weights):
        return self.experts[number](x.detach()) * weights


class AsksTheNext(Like):
    def expert(self, number, x, weights):
        return self.experts[(number + 1) % EXPERTS](x) * weights


class SkipsAnExpert(Like):
    def expert(self, number, x, weights):
        return super().expert(number, x, weights) if number else torch.zeros_like(x)


class HasACapacity(Like):
    def add(self, y, rows, part):
        return y.index_add(0, rows[:20], part[:20])


class HasACapacityOfALength(Like):
    longest = 200

    def add(self, y, rows, part):
        return y if len(y) > self.longest else super().add(y, rows, part)


class TakesTheLast(Like):
    def add(self, y, rows, part):
        return y.index_copy(0, rows, part)


class AddsTheTokens(Like):
    def end(self, y, x):
        return y + x


class Doubles(Like):
    def end(self, y, x):
        return 2 * y


class Clamps(Like):
    def end(self, y, x):
        return y.clamp(-50, 50)


class NoisyInTheEnd(Like):
    def end(self, y, x):
        return y + torch.randn_like(y) * 1e-9


class Counts(Like):
    calls = 0

    def end(self, y, x):
        self.calls += 1
        return y


class KeepsTheOutput(Like):
    def end(self, y, x):
        self.last = y
        return y


class KeepsAnotherLoss(Like):
    """Keeps a loss of the weights of chosen experts alone, and not of all scores."""

    def route(self, x):
        weights, chosen = super().route(x)
        share = F.one_hot(chosen, EXPERTS).float().sum(1).mean(0)
        self.loss = (share * torch.zeros_like(share).index_add(0, chosen[:, 0], weights[:, 0].float())).sum()
        return weights, chosen


class ReturnsAnotherLoss(Like):
    """That of large logits, not of loads."""

    def forward(self, x):
        return super().forward(x), self.gate(x).logsumexp(-1).square().mean()


class AddsTheLossThatItKept(Like):
    loss = 0.0

    def end(self, y, x):
        y = y + self.loss
        self.loss = y.mean().detach()
        return y


class SetsItOnItsGate(Like):
    """Keeps what nobody sees that looks at the block itself."""

    def route(self, x):
        weights, chosen = super().route(x)
        self.gate.load = chosen
        return weights, chosen


class DoublesAfterALoss(Like):
    """Reads what it kept under a name that its code does not say."""

    def route(self, x):
        self.last_loss = 1.0
        return super().route(x)

    def forward(self, x):
        kept = any(hasattr(self, f"{kind}_loss") for kind in ("last", "first"))
        return super().forward(x) * (2 if kept else 1)


class KeepsAList(Like):
    def route(self, x):
        self.seen: list[torch.Tensor] = []
        return super().route(x)


class Recorder(nn.Module):
    def forward(self, chosen):
        self.last = chosen
        return chosen


class HasARecorder(Like):
    def __init__(self) -> None:
        super().__init__()
        self.recorder = Recorder()

    def route(self, x):
        weights, chosen = super().route(x)
        return weights, self.recorder(chosen)


class Temperature(Like):
    def route(self, x):
        weights, chosen = F.softmax(self.gate(x) / 2, -1, dtype=torch.float32).topk(CHOSEN, -1)
        return weights.to(x.dtype), chosen


class TakesTheSmallest(Like):
    def route(self, x):
        weights, chosen = F.softmax(self.gate(x), -1, dtype=torch.float32).topk(CHOSEN, -1, largest=False)
        return weights.to(x.dtype), chosen


class BiasInTheWeights(Like):
    def route(self, x):
        weights, chosen = (F.softmax(self.gate(x), -1, dtype=torch.float32) + 0.1).topk(CHOSEN, -1)
        return weights.to(x.dtype), chosen


class AddsAParameter(Like):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(EXPERTS))

    def route(self, x):
        weights, chosen = F.softmax(self.gate(x) + self.bias, -1, dtype=torch.float32).topk(CHOSEN, -1)
        return weights.to(x.dtype), chosen


class HidesTokensFromItsGate(Like):
    def route(self, x):
        return super().route(x.detach())


class TellsAnObject(Like):
    def route(self, x):
        weights, chosen = super().route(x)
        LOADS.append(chosen.shape)
        return weights, chosen


class HasAChooser(Like):
    """A block whose gate is a module, and which is served."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Chooser()

    def route(self, x):
        chosen, weights, _ = self.gate(x)
        return weights.to(x.dtype), chosen


class SkipsSmallWeights(HasAChooser):
    def route(self, x):
        weights, chosen = super().route(x)
        return torch.where(weights < 1e-3, 0.0, weights), chosen


class TrainsNoGate(HasAChooser):
    def route(self, x):
        with torch.no_grad():
            return super().route(x)


class Normalises(Like):
    def route(self, x):
        return super().route(F.normalize(x, dim=-1))


class MaskingGate(nn.Module):
    """Says by masks where tokens go, and which of them are more than an expert takes, as GShard does."""

    def __init__(self) -> None:
        super().__init__()
        self.wg = nn.Linear(WIDTH, EXPERTS, bias=False)

    def forward(self, x):
        weights, chosen = F.softmax(self.wg(x), -1).topk(CHOSEN, -1)
        places = torch.zeros(len(x), EXPERTS, device=x.device).scatter(1, chosen, 1.0)
        row = (places.cumsum(0) * places).long() - 1
        mask = torch.zeros(len(x), EXPERTS, len(x), device=x.device)
        mask = mask.scatter(2, row.clamp(min=0)[..., None], (places * (row < 64))[..., None])
        return mask, mask * torch.zeros_like(places).scatter(1, chosen, weights)[..., None]


class DispatchesByMasks(Like):
    def __init__(self) -> None:
        super().__init__()
        self.gate = MaskingGate()

    def forward(self, x):
        flat = x.reshape(-1, WIDTH)
        mask, weights = self.gate(flat)
        given = torch.einsum("tec,tw->ecw", mask, flat)
        parts = torch.stack([expert(rows) for expert, rows in zip(self.experts, given)])
        return torch.einsum("tec,ecw->tw", weights, parts).view(x.shape)


class MoEOfPlainMLPs(HasAChooser):
    """Has experts without a gate."""

    def __init__(self) -> None:
        super().__init__()
        made = (nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH)) for _ in range(EXPERTS))
        self.experts = nn.ModuleList(made)


SERVED = (Like, HasAChooser)
LIKE_MOE_BLOCKS = (*(cls for cls in Like.__subclasses__() if cls not in SERVED), *HasAChooser.__subclasses__())
