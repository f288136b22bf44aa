"""Norms and gated MLPs in other people's words, and modules that look like them and compute something else."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, INNER = 64, 96


class Scaled(nn.Module):
    """The members of a norm."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.gain = nn.Parameter(1 + 0.1 * torch.randn(WIDTH, generator=torch.Generator().manual_seed(0)))
        self.epsilon = eps


class MetaNorm(Scaled):
    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)

    def forward(self, x):
        return self._norm(x.float()).type_as(x) * self.gain


class LitNorm(Scaled):
    def __init__(self, dim: int = -1) -> None:
        super().__init__(1e-6)
        self.dim, self.add_unit_offset = dim, False

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.float()
        norm_x = torch.mean(x * x, dim=self.dim, keepdim=True)
        x_normed = x * torch.rsqrt(norm_x + self.epsilon)
        gain = (1 + self.gain) if self.add_unit_offset else self.gain
        return (x_normed * gain.float()).to(dtype=dtype)


class UnitOffsetNorm(LitNorm):
    def __init__(self) -> None:
        super().__init__()
        self.add_unit_offset = True


class DividingNorm(Scaled):
    def forward(self, hidden):
        h = hidden.to(torch.float32)
        rms = torch.sqrt(torch.sum(h**2, dim=-1, keepdim=True) / h.shape[-1] + self.epsilon)
        return (h / rms).to(hidden.dtype) * self.gain


class ReciprocalNorm(Scaled):
    def forward(self, x):
        y = x.to(torch.float32)
        inverse = (y.square().mean(dim=-1, keepdim=True) + self.epsilon).sqrt().reciprocal()
        return torch.mul(self.gain, y.mul(inverse).to(x.dtype))


class FunctionalNorm(Scaled):
    def forward(self, x):
        return F.rms_norm(x, (x.size(-1),), self.gain, self.epsilon)


class LiteralNorm(Scaled):
    def forward(self, x):
        y = x.float()
        return (y * (y.pow(2).mean(-1, True) + 1e-5) ** -0.5).to(x.dtype) * self.gain


class InheritingNorm(MetaNorm):
    def forward(self, x):
        return super()._norm(x.float()).to(x.dtype) * self.gain


class DelegatingNorm(MetaNorm):
    def forward(self, x):
        return super().forward(x)


class WeightlessNorm(nn.Module):
    def forward(self, x):
        y = x.float()
        return (y * torch.rsqrt((y * y).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class GemmaLikeNorm(Scaled):
    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return (y * (1.0 + self.gain.float())).to(x.dtype)


class PlainNorm(Scaled):
    """Computes in the dtype of its input, whatever that rounds; the kernel computes in float32."""

    def forward(self, x):
        rms = torch.sqrt(torch.mean(x * x, dim=-1, keepdim=True) + self.epsilon)
        return x / rms * self.gain


# class -> the layer that computes the same
NORMS = {
    MetaNorm: "RMSNorm",
    LitNorm: "RMSNormCastLast",
    UnitOffsetNorm: "RMSNormZeroCentered",
    DividingNorm: "RMSNorm",
    ReciprocalNorm: "RMSNorm",
    FunctionalNorm: "RMSNormCastLast",
    LiteralNorm: "RMSNorm",
    InheritingNorm: "RMSNorm",
    DelegatingNorm: "RMSNorm",
    WeightlessNorm: "RMSNormWeightless",
    GemmaLikeNorm: "RMSNormZeroCentered",
    PlainNorm: "RMSNorm",
}


class EpsOutside(Scaled):
    def forward(self, x):
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.epsilon) * self.gain


class SumForMean(Scaled):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.epsilon) * self.gain


class Centred(Scaled):
    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon) * self.gain


class OverTokens(Scaled):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + self.epsilon) * self.gain


class ScaledByRoot(Scaled):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon) * self.gain * math.sqrt(WIDTH)


class Biased(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon) * self.gain + self.shift


class Clamped(Scaled):
    def forward(self, x):
        x = x.clamp(-100, 100)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon) * self.gain


class OfLongOnesOnly(MetaNorm):
    def forward(self, x):
        return super().forward(x) if x.shape[1] < 512 else x


class InTrainingOnly(MetaNorm):
    def forward(self, x):
        return super().forward(x) if self.training else x


class Counting(MetaNorm):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Reading(MetaNorm):
    def forward(self, x):
        return super().forward(x) if float(x.abs().max()) < 1e6 else x


class Dropping(MetaNorm):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.1, self.training)


class Writing(MetaNorm):
    def forward(self, x):
        return x.copy_(super().forward(x))


class InGroups(Scaled):
    def forward(self, x):
        y = x.unflatten(-1, (2, -1))
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.epsilon)).flatten(-2) * self.gain


class RoundedTwice(Scaled):
    """Rounds the mean to the dtype of its input, which is seen in 16 bits alone."""

    def forward(self, x):
        mean = x.float().pow(2).mean(-1, keepdim=True).to(x.dtype)
        return (x * torch.rsqrt(mean + self.epsilon).to(x.dtype)).to(torch.float16).to(x.dtype) * self.gain


class SquaredGain(MetaNorm):
    def forward(self, x):
        return super().forward(x) * self.gain


class DetachedMean(Scaled):
    """Its gradient is another one."""

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True).detach() + self.epsilon) * self.gain


class Exchanging(MetaNorm):
    """Calls an operator of another library than torch."""

    def forward(self, x):
        return torch.ops._c10d_functional.wait_tensor(super().forward(x))


class WithoutGradients(MetaNorm):
    def forward(self, x):
        return super().forward(x) if torch.is_grad_enabled() else x


class OfMatricesAlone(MetaNorm):
    def forward(self, x):
        return super().forward(x) if x.dim() > 2 else x


LIKE_NORMS = [
    *(EpsOutside, SumForMean, Centred, OverTokens, ScaledByRoot, Biased, Clamped, OfLongOnesOnly, InTrainingOnly),
    *(Counting, Reading, Dropping, Writing, InGroups, RoundedTwice, SquaredGain, DetachedMean, Exchanging),
    WithoutGradients,
    OfMatricesAlone,
]


class Projected(nn.Module):
    """The projections of a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.w2 = nn.Linear(INNER, WIDTH, bias=False)


class MetaMLP(Projected):
    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class UpFirst(Projected):
    def forward(self, x):
        up = self.w1(x)
        return self.w2(up * F.silu(self.w3(x)))


class BySigmoid(Projected):
    def forward(self, x):
        gate, up = self.w1(x), self.w3(x)
        hidden = gate * torch.sigmoid(gate)
        return self.w2(hidden * up)


class ByModule(Projected):
    def __init__(self, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.activation = activation or nn.SiLU()

    def forward(self, hidden):
        return self.w2(torch.mul(self.activation(self.w1(hidden)), self.w3(hidden)))


class ByFunction(Projected):
    def __init__(self) -> None:
        super().__init__()
        self.act = F.silu

    def forward(self, x):
        return self.w2(self.act(self.w1(x)) * self.w3(x))


class TanhGated(Projected):
    def forward(self, x):
        return self.w2(F.gelu(self.w1(x), approximate="tanh") * self.w3(x))


class ExactlyGated(ByModule):
    def __init__(self) -> None:
        super().__init__(nn.GELU())


class TanhByModule(ByModule):
    def __init__(self) -> None:
        super().__init__(nn.GELU(approximate="tanh"))


class InFloat32(Projected):
    def forward(self, x):
        gate, up = self.w1(x), self.w3(x)
        return self.w2((F.silu(gate.float()) * up.float()).to(gate.dtype))


class WithBiases(MetaMLP):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)


class Helped(Projected):
    def _gate(self, x):
        return F.silu(self.w1(x))

    def forward(self, x):
        gated = self._gate(x)
        return self.w2(gated * self.w3(x))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(WIDTH, 2 * INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        gate, up = self.c_fc(x).chunk(2, dim=-1)
        return self.c_proj(F.silu(gate) * up)


SWIGLUS = (ByFunction, MetaMLP, UpFirst, BySigmoid, ByModule, InFloat32, WithBiases, Helped)
MLPS = {
    **dict.fromkeys(SWIGLUS, "SwiGLUMLP"),
    **dict.fromkeys((TanhGated, TanhByModule), "GeGLUMLP"),
    ExactlyGated: "ExactGeGLUMLP",
    Packed: "FusedSwiGLUMLP",
}


class ReluGated(Projected):
    def forward(self, x):
        return self.w2(F.relu(self.w1(x)) * self.w3(x))


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


class Halved(MetaMLP):
    def forward(self, x):
        return 0.5 * super().forward(x)


class DroppedInside(Projected):
    def forward(self, x):
        return self.w2(F.dropout(F.silu(self.w1(x)) * self.w3(x), 0.1, self.training))


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


class Interleaved(Packed):
    def forward(self, x):
        both = self.c_fc(x)
        return self.c_proj(F.silu(both[..., ::2]) * both[..., 1::2])


LIKE_MLPS = [
    *(ReluGated, ClampedAtSeven, Squared, Added, Residual, Halved, DroppedInside, SteeperGate, FirstToken, ByLength),
    *(OtherwiseInHalf, Noisy, GatedTwice, ShiftedUp, HalvedGradient, PackedUpFirst, Interleaved),
]
