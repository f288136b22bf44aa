"""Modules that look like norms or activations, and compute something that no layer does."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.integration.recognition.spellings.other_peoples_layer_norms import Affine
from tests.integration.recognition.spellings.other_peoples_norms import WIDTH, MetaNorm, Scaled, rms_norm


class EpsOutside(Scaled):
    def forward(self, x):
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.epsilon) * self.gain


class EpsByDtype(Scaled):
    """Has another eps than torch's norm in 16 bits, which computes in float32."""

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + torch.finfo(x.dtype).eps) * self.gain


class EpsBelowFloat32(Scaled):
    """Has that of torch's norm in float64 alone."""

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + torch.finfo(torch.float64).eps)
        return y.to(x.dtype) * self.gain


class SumForMean(Scaled):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.epsilon) * self.gain


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


class ClampedFarAway(MetaNorm):
    """Keeps within what float16 holds."""

    def forward(self, x):
        return super().forward(x.clamp(-65504, 65504))


class NotInHalf(MetaNorm):
    def forward(self, x):
        return super().forward(x) if x.dtype != torch.float16 else x * self.gain.half()


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


class OverStandardDeviation(Affine):
    """Adds eps to the deviation, which is unbiased."""

    def forward(self, x):
        return self.gain * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.epsilon) + self.shift


class UnbiasedVariance(Affine):
    def forward(self, x):
        y = x - x.mean(-1, keepdim=True)
        return self.gain * y * torch.rsqrt(x.var(-1, keepdim=True) + self.epsilon) + self.shift


class UnitOffsetLayerNorm(Affine):
    def forward(self, x):
        return F.layer_norm(x.float(), (WIDTH,), self.gain.float() + 1, self.shift.float(), self.epsilon).to(x.dtype)


class SubtractedBias(Affine):
    def forward(self, x):
        return F.layer_norm(x.float(), (WIDTH,), self.gain.float(), -self.shift.float()).to(x.dtype)


class LargestLength(Scaled):
    """Divides by a length that is one at the least."""

    def forward(self, x):
        return F.normalize(x, dim=-1, eps=1.0) * math.sqrt(WIDTH) * self.gain


class OfOneWidth(nn.Module):
    """Is a norm without weights of that width alone, and may be given others."""

    def forward(self, x):
        return x * math.sqrt(WIDTH) / torch.linalg.vector_norm(x, dim=-1, keepdim=True)


class ShortLength(Scaled):
    """Divides by a length that is so much at the least as rows may have."""

    def forward(self, x):
        return F.normalize(x, dim=-1, eps=1e-10) * math.sqrt(WIDTH) * self.gain


class ClampedOnceFarAway(Scaled):
    """Norms without an eps what it clamps."""

    def forward(self, x):
        x = x.clamp_min(-1e9)
        return x / x.square().mean(-1, keepdim=True).sqrt() * self.gain


class MeanOfMagnitudes(Scaled):
    def forward(self, x):
        return x / (torch.linalg.vector_norm(x, 1, dim=-1, keepdim=True) / WIDTH + self.epsilon) * self.gain


class PartOfIt(Scaled):
    """Takes the mean of a quarter of the values."""

    def forward(self, x):
        return x * torch.rsqrt(x[..., : WIDTH // 4].pow(2).mean(-1, keepdim=True) + self.epsilon) * self.gain


class NegativeGain(Scaled):
    def forward(self, x):
        return rms_norm(x, 2 - self.gain, self.epsilon)


class ReversedGain(Scaled):
    def forward(self, x):
        return rms_norm(x, self.gain.reshape(2, -1).transpose(0, 1).reshape(-1), self.epsilon)


class Float16Inside(Scaled):
    def forward(self, x):
        return rms_norm(x.half(), self.gain.half(), self.epsilon).to(x.dtype)


class GateOfHalves(Scaled):
    def forward(self, x, z):
        return rms_norm(x * F.silu(z)[..., : WIDTH // 2].repeat(1, 1, 2), self.gain, self.epsilon)


class GateAdded(Scaled):
    def forward(self, x, z):
        return rms_norm(x, self.gain, self.epsilon) + F.silu(z)


class GateOfGelu(Scaled):
    def forward(self, x, z):
        return rms_norm(x, self.gain, self.epsilon) * F.gelu(z)


class GateNormed(Scaled):
    """Norms what the gate multiplies with and the gate."""

    def forward(self, x, z):
        return rms_norm(x * F.silu(rms_norm(z)), self.gain, self.epsilon)


class GateElsewhenNone(Scaled):
    """Does something else without a gate."""

    def forward(self, x, z=None):
        return x if z is None else rms_norm(x, self.gain, self.epsilon) * F.silu(z)


class GateBehindInGroups(Scaled):
    def forward(self, x, z):
        y = rms_norm(x.unflatten(-1, (4, -1)), None, self.epsilon).flatten(-2)
        return y * self.gain * F.silu(z)


class Sharper(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.5 * x)


class ExactGeluByErf(nn.Module):
    """Is one operator of torch by another name, and has no layer."""

    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(torch.erf(x / math.sqrt(2.0))))


class ClampedGelu(nn.Module):
    def forward(self, x):
        return (0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))).clamp(max=65504)


class TanhOfHalf(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(0.5 * x))


class OneOperator(Affine):
    """Is torch's own layer norm, which has an operator."""

    def forward(self, x):
        return F.layer_norm(x, self.gain.shape, self.gain, self.shift, self.epsilon)


class OneOperatorWithoutBias(Scaled):
    """Is that of nanoGPT, whose bias may be None."""

    def forward(self, x):
        return F.layer_norm(x, self.gain.shape, self.gain, None, self.epsilon)


LIKE_NORMS = [
    *(NotInHalf, OneOperator, OneOperatorWithoutBias),
    *(
        EpsOutside,
        EpsByDtype,
        EpsBelowFloat32,
        SumForMean,
        OverTokens,
        ScaledByRoot,
        Biased,
        Clamped,
        ClampedFarAway,
        OfLongOnesOnly,
        InTrainingOnly,
    ),
    *(Counting, Reading, Dropping, Writing, InGroups, RoundedTwice, SquaredGain, DetachedMean, Exchanging),
    *(WithoutGradients, OfMatricesAlone, OverStandardDeviation, UnbiasedVariance, UnitOffsetLayerNorm),
    *(
        SubtractedBias,
        LargestLength,
        OfOneWidth,
        ShortLength,
        ClampedOnceFarAway,
        MeanOfMagnitudes,
        PartOfIt,
        NegativeGain,
    ),
    *(ReversedGain, Float16Inside, Sharper, ExactGeluByErf, ClampedGelu, TanhOfHalf),
    *(GateOfHalves, GateAdded, GateOfGelu, GateNormed, GateElsewhenNone, GateBehindInGroups),
]
