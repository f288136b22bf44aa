"""What looks like a router and computes something else, and words of the reason why no kernel does."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.integration.recognition.spellings.other_peoples_routers import EXPERTS, WIDTH, Plain


class UsualGate(Plain):
    """Chooses as routers do; each of those below changes one step."""

    top_k, n_group, topk_group = 4, 4, 2

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.randn(EXPERTS) / 3)

    def forward(self, x):
        x = self.prepare(x.reshape(-1, WIDTH))
        logits = self.change(F.linear(x.float(), self.weight.float()))
        scores = self.score(logits)
        index = self.choose(scores + self.bias, logits)
        return index, self.weigh(scores, index)

    def prepare(self, x):
        return x

    def change(self, logits):
        return logits

    def score(self, logits):
        return logits.sigmoid()

    def choose(self, merits, logits):
        return merits.topk(self.top_k, dim=-1)[1]

    def weigh(self, scores, index):
        weights = scores.gather(1, index)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20)

    def by_group(self, merits, summed, fill=float("-inf")):
        parts = merits.view(len(merits), self.n_group, -1)
        kept = summed(parts).topk(self.topk_group, dim=-1)[1]
        mask = torch.zeros(len(merits), self.n_group).scatter(1, kept, 1.0)
        return parts.masked_fill(mask.unsqueeze(-1) == 0, fill).flatten(1)


class TemperedGate(UsualGate):
    def change(self, logits):
        return logits / 1.5


class ScaledLogitsGate(UsualGate):
    def change(self, logits):
        return logits * WIDTH**-0.5


class SoftcappedGate(UsualGate):
    def change(self, logits):
        return 30 * torch.tanh(logits / 30)


class ClampedLogitsGate(UsualGate):
    def score(self, logits):
        return logits.clamp(-50, 50).softmax(-1)


class NoisyGate(UsualGate):
    def change(self, logits):
        return logits + 0.01 * torch.randn_like(logits)


class JitteringGate(UsualGate):
    def prepare(self, x):
        return x * torch.empty_like(x).uniform_(0.98, 1.02)


class SmallestGate(UsualGate):
    def choose(self, merits, logits):
        return merits.topk(self.top_k, dim=-1, largest=False)[1]


class AscendingGate(UsualGate):
    def choose(self, merits, logits):
        return super().choose(merits, logits).flip(-1)


class InOrderOfExpertsGate(UsualGate):
    def choose(self, merits, logits):
        return super().choose(merits, logits).sort(dim=-1)[0]


class BiasedWeightsGate(UsualGate):
    def weigh(self, scores, index):
        return super().weigh(scores + self.bias, index)


class ClampedSumGate(UsualGate):
    def weigh(self, scores, index):
        weights = scores.gather(1, index)
        return weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)


class OwnEpsGate(UsualGate):
    def weigh(self, scores, index):
        weights = scores.gather(1, index)
        return weights / (weights.sum(-1, keepdim=True) + torch.finfo(scores.dtype).eps)


class SquaredGate(UsualGate):
    def weigh(self, scores, index):
        return super().weigh(scores * scores, index)


class LengthGate(UsualGate):
    def weigh(self, scores, index):
        weights = scores.gather(1, index)
        return weights / weights.norm(dim=-1, keepdim=True)


class MeanOfGroupsGate(UsualGate):
    def choose(self, merits, logits):
        return super().choose(self.by_group(merits, lambda parts: parts.mean(-1)), logits)


class ThreeBestGate(UsualGate):
    def choose(self, merits, logits):
        return super().choose(self.by_group(merits, lambda parts: parts.topk(3)[0].sum(-1)), logits)


class ZeroFilledGate(UsualGate):
    def choose(self, merits, logits):
        return super().choose(self.by_group(merits, lambda parts: parts.topk(2)[0].sum(-1), 0.0), logits)


class BiasedLogitsGate(UsualGate):
    """Takes the softmax of what it chose by logits and a bias, whose order is not that of scores and a bias."""

    def score(self, logits):
        return logits.softmax(-1)

    def choose(self, merits, logits):
        return (logits + self.bias).topk(self.top_k)[1]


class CapacityGate(UsualGate):
    """Leaves out tokens of experts that have enough."""

    def weigh(self, scores, index):
        place = F.one_hot(index, EXPERTS).sum(1).cumsum(0).gather(1, index)
        return super().weigh(scores, index) * (place <= 2)


class CountingGate(UsualGate):
    """Keeps how often each expert was chosen."""

    def choose(self, merits, logits):
        index = super().choose(merits, logits)
        self.last = index
        return index


class HostGate(UsualGate):
    def choose(self, merits, logits):
        return super().choose(merits if merits.max().item() < 10 else -merits, logits)


class ShortGate(UsualGate):
    """Does something else for few tokens."""

    def choose(self, merits, logits):
        return super().choose(merits if len(merits) < 100 else -merits, logits)


class ProductOfTwoGate(UsualGate):
    def change(self, logits):
        return logits @ self.weight.float() @ self.weight.float().t()


class FillingGate(UsualGate):
    """Gives all experts a weight, those that are not chosen a small one."""

    def weigh(self, scores, index):
        return torch.full_like(scores, 1e-6).scatter(1, index, super().weigh(scores, index))


class MaskingGate(UsualGate):
    """Says which experts are chosen by a mask alone."""

    def choose(self, merits, logits):
        return torch.zeros_like(merits).scatter(1, super().choose(merits, logits), 1.0)

    def weigh(self, scores, index):
        return scores * index


NOTHING = "it does not return experts, and as many weights, for each token"
WEIGHTS, CHOICE = "its weights are no softmax or sigmoid", "it does not choose the experts with the largest scores"
OTHERWISE = "it weighs in another way at other numbers"
LIKE_ROUTERS: dict[type[nn.Module], str] = {
    TemperedGate: WEIGHTS,
    ScaledLogitsGate: WEIGHTS,
    SoftcappedGate: WEIGHTS,
    ClampedLogitsGate: OTHERWISE,
    NoisyGate: "it calls randn_like",
    JitteringGate: "it calls empty_like",
    SmallestGate: CHOICE,
    AscendingGate: "it calls flip",
    InOrderOfExpertsGate: "it gives experts in another order than that of their scores",
    BiasedWeightsGate: WEIGHTS,
    ClampedSumGate: OTHERWISE,
    OwnEpsGate: OTHERWISE,
    SquaredGate: WEIGHTS,
    LengthGate: WEIGHTS,
    MeanOfGroupsGate: CHOICE,
    ThreeBestGate: CHOICE,
    ZeroFilledGate: "it fills groups that are not chosen with 0",
    BiasedLogitsGate: CHOICE,
    CapacityGate: "it calls",
    CountingGate: "it writes",
    HostGate: "the host waits for a number in it",
    ShortGate: "it asks for sizes",
    ProductOfTwoGate: WEIGHTS,
    FillingGate: WEIGHTS,
    MaskingGate: NOTHING,
}
