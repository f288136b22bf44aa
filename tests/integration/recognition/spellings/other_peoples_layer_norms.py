"""Layer norms, gated norms and activations in other people's words."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.integration.recognition.spellings.other_peoples_norms import WIDTH, Scaled, rms_norm


class Affine(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.linspace(-1, 1, WIDTH))


class Centred(Scaled):
    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon) * self.gain


class Float32LayerNorm(nn.LayerNorm):
    """Torch's own, in float32."""

    def __init__(self) -> None:
        super().__init__(WIDTH)

    def forward(self, inputs):
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(inputs.float(), self.normalized_shape, weight, bias, self.eps).to(inputs.dtype)


class WideInputLayerNorm(Float32LayerNorm):
    """Has weights that stay in float32, whatever becomes of others."""

    def _apply(self, fn, recurse=True):
        return super()._apply(lambda tensor: fn(tensor).float(), recurse)

    def forward(self, x):
        wide = F.layer_norm(x.to(torch.float32), self.normalized_shape, self.weight, self.bias, self.eps)
        return wide.to(x.dtype)


class UnscaledLayerNorm(nn.Module):
    def forward(self, x):
        return F.layer_norm(x.float(), (x.size(-1),), eps=1e-6).type_as(x)


class VarianceLayerNorm(Affine):
    def forward(self, x):
        y = x.float()
        mean, var = y.mean(-1, keepdim=True), y.var(-1, unbiased=False, keepdim=True)
        return ((y - mean) / torch.sqrt(var + self.epsilon)).to(x.dtype) * self.gain + self.shift


class FusedMomentsLayerNorm(Affine):
    def forward(self, x):
        var, mean = torch.var_mean(x, dim=-1, keepdim=True, correction=0)
        return torch.addcmul(self.shift, (x - mean) * torch.rsqrt(var + self.epsilon), self.gain)


class DifferenceOfMomentsLayerNorm(Affine):
    def forward(self, x):
        y = x.float()
        u = y.mean(-1, keepdim=True)
        s = (y - u).pow(2).mean(-1, keepdim=True)
        y = (y - u) / torch.sqrt(s + self.epsilon)
        return (self.gain.float() * y + self.shift.float()).to(x.dtype)


class UnbiasedCohereNorm(Scaled):
    def forward(self, x):
        y = x.to(torch.float32)
        y = y - y.mean(-1, keepdim=True)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.epsilon)
        return (self.gain.to(torch.float32) * y).to(x.dtype)


class OfHeads(Scaled):
    """Wants heads: four dimensions."""

    def forward(self, x):
        _b, _h, _n, _d = x.shape
        gain = 1.0 + self.gain[None, None, None, :]
        rms = (x.float().pow(2).mean(-1, keepdim=True) + 1.0e-6).rsqrt().to(x.dtype)
        return x * rms * gain


LAYER_NORMS = {
    OfHeads: "RMSNormZeroCentered",
    Centred: "LayerNorm",
    Float32LayerNorm: "LayerNorm",
    WideInputLayerNorm: "LayerNorm",
    UnscaledLayerNorm: "LayerNormFloat32",
    VarianceLayerNorm: "LayerNorm",
    FusedMomentsLayerNorm: "LayerNorm",
    DifferenceOfMomentsLayerNorm: "LayerNorm",
    UnbiasedCohereNorm: "LayerNormFloat32",
}


class GateBehind(Scaled):
    def forward(self, x, z):
        return (rms_norm(x, self.gain, self.epsilon) * F.silu(z.float())).to(x.dtype)


class GateBehindInFloat32(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.swish = nn.SiLU()

    def forward(self, x, g):
        y = rms_norm(x.float(), None, self.epsilon) * self.gain.float()
        return (y * self.swish(g.float())).to(x.dtype)


class SwishBehind(Scaled):
    """Multiplies in the dtype of its input."""

    def forward(self, x, g=None):
        y = rms_norm(x, self.gain, self.epsilon)
        return y if g is None else y * g * torch.sigmoid(g)


class SigmoidBehind(Scaled):
    def forward(self, x, gate):
        return (rms_norm(x.float(), self.gain.float(), self.epsilon) * gate.float().sigmoid()).to(x.dtype)


class GateFirst(Scaled):
    def forward(self, x, z=None):
        y = x.float()
        if z is not None:
            y = y * F.silu(z.float())
        return rms_norm(y, None, self.epsilon).to(x.dtype) * self.gain


class GroupedGateFirst(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.groups = 4

    def forward(self, x, z):
        y = (x.float() * F.silu(z.float())).unflatten(-1, (self.groups, -1))
        y = y / torch.sqrt(y.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return (y.flatten(-2) * self.gain.float()).to(x.dtype)


GATED_NORMS = {
    GateBehind: "RMSNormGated",
    GateBehindInFloat32: "RMSNormGatedCastLast",
    SwishBehind: "RMSNormGated",
    SigmoidBehind: "RMSNormGatedCastLast",
    GateFirst: "MambaRMSNormGated",
    GroupedGateFirst: "MambaRMSNormGated",
}


class GeluByPower(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


class GeluByProducts(nn.Module):
    def forward(self, x):
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


class Quick(nn.Module):
    def __init__(self, alpha: float = 1.702) -> None:
        super().__init__()
        self.alpha = alpha

    def forward(self, x):
        return x.mul(torch.sigmoid(self.alpha * x))


class GeluByTensor(nn.Module):
    def forward(self, x):
        root = torch.sqrt(torch.tensor(2.0 / torch.pi))
        return 0.5 * x * (1 + torch.tanh(root * (x + 0.044715 * torch.pow(x, 3))))


class GatingHalves(nn.Module):
    """Has its projections elsewhere."""

    def forward(self, x):
        gate, x = x.chunk(2, dim=-1)
        return F.silu(gate) * x


ACTIVATIONS = {
    GeluByTensor: "NewGELU",
    GatingHalves: "FusedSwiGLUMLP",
    GeluByPower: "NewGELU",
    GeluByProducts: "FastGELU",
    Quick: "QuickGELU",
}
