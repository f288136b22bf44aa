"""Modules that look like gated MLPs, and compute something that no layer does."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.integration.recognition.spellings.other_peoples_longer_mlps import AddingWhatIsLeft, ClampedBoth, InSequences
from tests.integration.recognition.spellings.other_peoples_mlps import INNER, MetaMLP, Packed, Projected
from tests.integration.recognition.spellings.other_peoples_norms import WIDTH


class ReluGated(Projected):
    def forward(self, x):
        return self.w2(F.relu(self.w1(x)) * self.w3(x))


class GluGated(Packed):
    def forward(self, x):
        return self.c_proj(F.glu(self.c_fc(x)))


class ClampedAtSeven(Projected):
    def forward(self, x):
        return self.w2(F.silu(self.w1(x)).clamp(max=7) * self.w3(x))


class Squared(Projected):
    def forward(self, x):
        return self.w2(F.silu(self.w1(x)).square() * self.w3(x))


class Added(Projected):
    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) + self.w3(x))


class Residual(MetaMLP):
    def forward(self, x):
        return x + super().forward(x)


class SteeperGate(Projected):
    def forward(self, x):
        gate = self.w1(x)
        return self.w2(gate * torch.sigmoid(1.702 * gate) * self.w3(x))


class FirstToken(Projected):
    def forward(self, x):
        return self.w2(F.silu(self.w1(x[:, :1])) * self.w3(x))


class ByLength(MetaMLP):
    def forward(self, x):
        return super().forward(x) if x.shape[-2] < 100 else x


class OtherwiseInHalf(MetaMLP):
    def forward(self, x):
        return super().forward(x) if x.dtype != torch.float16 else self.w2(self.w1(x) * self.w3(x))


class Noisy(Projected):
    """Adds what is too little to be seen in numbers."""

    def forward(self, x):
        hidden = F.silu(self.w1(x)) * self.w3(x)
        return self.w2(hidden + 1e-9 * torch.randn(hidden.shape, dtype=x.dtype, device=x.device))


class GatedTwice(Projected):
    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * F.silu(self.w3(x)))


class ShiftedUp(Projected):
    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * (self.w3(x) + 1))


class _Halving(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        return 0.5 * grad


class HalvedGradient(Projected):
    def forward(self, x):
        return self.w2(_Halving.apply(F.silu(self.w1(x)) * self.w3(x)))


class PackedUpFirst(Packed):
    """Is one, but the operators take the gate first: a copy would cost what they save."""

    def forward(self, x):
        up, gate = self.c_fc(x).split(INNER, dim=-1)
        return self.c_proj(up * F.silu(gate))


class CastingByItself(Projected):
    """Is one under autocast alone, and gives the dtype of that."""

    def forward(self, x):
        with torch.autocast("npu", dtype=torch.bfloat16):
            return self.w2(F.silu(self.w1(x)) * self.w3(x))


class CastingByDecorator(Projected):
    forward = torch.autocast("npu", dtype=torch.bfloat16)(MetaMLP.forward)


class NeverCasting(Projected):
    """Turns off autocast around it, which the layer would not."""

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            return self.w2(F.silu(self.w1(x)) * self.w3(x))


class OfFixedHalves(nn.Module):
    """Takes halves of one width alone, and of others a part."""

    def forward(self, x):
        return F.silu(x.narrow(-1, 0, 32)) * x.narrow(-1, 32, 32)


class Interleaved(Packed):
    def forward(self, x):
        both = self.c_fc(x)
        return self.c_proj(F.silu(both[..., ::2]) * both[..., 1::2])


class ClampedAtOneSide(ClampedBoth):
    def forward(self, x):
        return self.w2(F.silu(self.w1(x).clamp(max=self.swiglu_limit)) * self.w3(x))


class ClampedByTwoLimits(ClampedBoth):
    def forward(self, x):
        gate, up = self.w1(x).clamp(max=2 * self.swiglu_limit), self.w3(x).clamp(-self.swiglu_limit, self.swiglu_limit)
        return self.w2(F.silu(gate) * up)


class ClampedFarAway(MetaMLP):
    """Keeps within what float16 holds."""

    def forward(self, x):
        return super().forward(x).clamp(-65504, 65504)


class ClampedThrice(ClampedBoth):
    def forward(self, x):
        return super().forward(x.clamp(-65504, 65504))


class GateAlone(Projected):
    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w1(x) + 0 * self.w3(x))


class DroppedInTrainingBranch(Projected):
    """Asks for the mode by itself."""

    def forward(self, x):
        h = F.silu(self.w1(x)) * self.w3(x)
        if self.training:
            h = F.dropout(h, 0.1)
        return self.w2(h)


class DroppedAlways(Projected):
    def forward(self, x):
        return self.w2(F.dropout(F.silu(self.w1(x)) * self.w3(x), 0.1))


class DroppedGate(Projected):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return self.w2(self.drop(F.silu(self.w1(x))) * self.w3(x))


class DetachedGate(Projected):
    def forward(self, x):
        return self.w2(F.silu(self.w1(x)).detach() * self.w3(x))


class DetachedInput(MetaMLP):
    def forward(self, x):
        return super().forward(x.detach())


class DetachedResult(MetaMLP):
    def forward(self, x):
        return super().forward(x).detach()


class OfOneTokenTwice(MetaMLP):
    def forward(self, x):
        return super().forward(x[..., :1, :].expand_as(x))


class SummedOverTokens(MetaMLP):
    def forward(self, x):
        return super().forward(x).sum(-2, keepdim=True)


class Shared(nn.Module):
    """Multiplies twice with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w1(x))


class NormedGate(Projected):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(INNER)

    def forward(self, x):
        return self.w2(F.silu(self.norm(self.w1(x))) * self.w3(x))


class ScaledInside(Projected):
    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x) * 0.5)


class Mish(Projected):
    def forward(self, x):
        return self.w2(F.mish(self.w1(x)) * self.w3(x))


class SigmoidGated(Projected):
    def forward(self, x):
        return self.w2(torch.sigmoid(self.w1(x)) * self.w3(x))


class QuickGated(Projected):
    def forward(self, x):
        gate = self.w1(x)
        return self.w2(gate * torch.sigmoid(1.702 * gate) * (self.w3(x) + 1))


class Chunked(MetaMLP):
    """Goes through its tokens one after the other."""

    def forward(self, x):
        return torch.cat([super(Chunked, self).forward(part) for part in x.split(1, dim=-2)], dim=-2)


class SeveralResults(MetaMLP):
    def forward(self, x):
        return super().forward(x), x


class WithTwoInputs(Projected):
    def forward(self, x, y):
        return self.w2(F.silu(self.w1(x)) * self.w3(y))


class WithMembers(Projected):
    """Keeps what it computed."""

    def forward(self, x):
        self.hidden = F.silu(self.w1(x)) * self.w3(x)
        return self.w2(self.hidden)


class WithBuffer(MetaMLP):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        return super().forward(x) * self.scale


class Shortened(nn.Sequential):
    """Is called like a container, and adds what it is given."""

    def forward(self, x):
        return x + super().forward(x)


class InAnotherSequence(InSequences):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Shortened(nn.Linear(WIDTH, WIDTH), nn.GELU(approximate="tanh"))
        self.fc1, self.fc2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


class ReluInASequence(InSequences):
    def __init__(self) -> None:
        super().__init__()
        self.gate[1] = nn.ReLU()


class OneProjectionTwice(InSequences):
    def forward(self, x):
        return self.fc2(self.fc1(x) * self.gate(x)) + self.fc2(self.fc1(x) * self.gate(x))


class AddingTwice(AddingWhatIsLeft):
    def forward(self, hidden_states, residual):
        return super().forward(hidden_states, residual) + residual


class AddingToANorm(AddingWhatIsLeft):
    def forward(self, hidden_states, residual):
        return super().forward(F.layer_norm(residual, (WIDTH,)), residual)


class AddingWithoutAGradient(AddingWhatIsLeft):
    def forward(self, hidden_states, residual):
        return super().forward(hidden_states, residual.detach())


LIKE_MLPS = [
    *(ReluGated, GluGated, ClampedAtSeven, Squared, Added, Residual, SteeperGate, FirstToken, ByLength),
    *(OtherwiseInHalf, Noisy, GatedTwice, ShiftedUp, HalvedGradient, PackedUpFirst, Interleaved),
    *(CastingByItself, CastingByDecorator, NeverCasting, OfFixedHalves),
    *(ClampedAtOneSide, ClampedByTwoLimits, ClampedFarAway, ClampedThrice, GateAlone, DroppedInTrainingBranch),
    *(DroppedAlways, DroppedGate, DetachedGate, DetachedInput, DetachedResult, OfOneTokenTwice, SummedOverTokens),
    *(Shared, NormedGate, ScaledInside, Mish, SigmoidGated, QuickGated, Chunked, SeveralResults, WithMembers),
    *(WithBuffer, WithTwoInputs, InAnotherSequence, ReluInASequence, OneProjectionTwice),
    *(AddingTwice, AddingToANorm, AddingWithoutAGradient),
]
