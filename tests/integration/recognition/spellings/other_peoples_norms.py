"""RMS norms and layer norms in other people's words."""

import functools
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 64
EPSILON = 1e-5


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


class EpslessNorm(Scaled):
    def forward(self, x):
        return F.rms_norm(x, (x.size(-1),), self.gain)


class WeightlessEpslessNorm(nn.Module):
    def forward(self, x):
        return F.rms_norm(x, (x.size(-1),))


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


class EinsumNorm(Scaled):
    def forward(self, x):
        y = x.float()
        mean = torch.einsum("...d,...d->...", y, y).unsqueeze(-1) / y.shape[-1]
        return (y * torch.rsqrt(mean + self.epsilon)).to(x.dtype) * self.gain


class LengthNorm(Scaled):
    """Takes the mean from the length of a vector."""

    def forward(self, x):
        y = x.float()
        length = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
        return (y / torch.sqrt(length**2 / WIDTH + self.epsilon)).type_as(x) * self.gain


class UnitLengthNorm(Scaled):
    """Makes the length one, and then the root of the width."""

    def forward(self, x):
        return F.normalize(x, dim=-1) * WIDTH**0.5 * self.gain


def _mean_of_squares(x):
    return x.float().square().mean(-1, keepdim=True) + EPSILON


class NormOfConstants(Scaled):
    """Reads its eps from its file, in a function of that."""

    def forward(self, x):
        return (x.float() * torch.rsqrt(_mean_of_squares(x))).type_as(x) * self.gain


class NormOfHeads(Scaled):
    """Takes heads side by side too."""

    def forward(self, x):
        heads = x.reshape(-1, WIDTH)
        return (heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + self.epsilon) * self.gain).view(x.shape)


class PromotedNorm(Scaled):
    """Asks torch for the widest dtype, and rounds the product of weight and root."""

    def forward(self, x):
        dtype = functools.reduce(torch.promote_types, (x.dtype, self.gain.dtype, torch.float32))
        scale = self.gain.to(dtype) * torch.rsqrt(torch.mean(x.to(dtype) ** 2, dim=-1, keepdim=True) + self.epsilon)
        return x * scale.to(x.dtype)


class DecoratedNorm(Scaled):
    """Turns autocast off by a decorator."""

    @torch.autocast("cpu", enabled=False)
    def forward(self, x):
        y = x.float()
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.epsilon)).type_as(x) * self.gain


class TorchNorm(nn.RMSNorm):
    """Torch's own, in float32."""

    def __init__(self) -> None:
        super().__init__(WIDTH, eps=1e-5)

    def forward(self, x):
        return F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps).to(x.dtype)


class AddcmulNorm(Scaled):
    """Adds the product with its weight: that is zero-centred."""

    def forward(self, x):
        y = x.float()
        y = y * torch.pow(y.square().mean(-1, keepdim=True) + self.epsilon, -0.5)
        return torch.addcmul(y, y, self.gain.float()).to(x.dtype)


class FluxNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor):
        x_dtype = x.dtype
        x = x.float()
        rrms = torch.rsqrt(torch.mean(x**2, dim=-1, keepdim=True) + 1e-6)
        return (x * rrms).to(dtype=x_dtype) * self.scale


class BaichuanNorm(Scaled):
    def forward(self, hidden_states):
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.epsilon)
        if self.gain.dtype in [torch.float16, torch.bfloat16]:
            hidden_states = hidden_states.to(self.gain.dtype)
        return self.gain * hidden_states


class ChatGLMNorm(Scaled):
    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.epsilon)
        return (self.gain * hidden_states).to(input_dtype)


class OlmoNorm(Scaled):
    """Turns autocast off, reads a configuration, and may have a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(eps=1e-5, use_bias=False)
        self.register_parameter("bias", None)

    def forward(self, x):
        with torch.autocast(enabled=False, device_type=x.device.type):
            og_dtype = x.dtype
            x = x.to(torch.float32)
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config.eps)
            x = x.to(og_dtype)
        return self.gain * x if self.bias is None else self.gain * x + self.bias


def rms_norm(x, weight=None, eps=1e-5):
    y = x.float()
    y = (y * torch.rsqrt((y * y).mean(dim=-1, keepdim=True) + eps)).to(x.dtype)
    return y if weight is None else y * weight


class NormByFunction(Scaled):
    """Its eps stands in the signature of a function."""

    def forward(self, x):
        return rms_norm(x, self.gain)


class OptionalWeightNorm(nn.Module):
    def __init__(self, dim: int = WIDTH, eps: float = 1e-6, elementwise_affine: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim)) if elementwise_affine else None
        self.eps = eps

    def forward(self, hidden_states):
        return rms_norm(hidden_states, self.weight, self.eps)


@torch.jit.script
def scripted(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


class ScriptedNorm(Scaled):
    def forward(self, x):
        return scripted(x, self.gain, self.epsilon)


class ResidualNorm(MetaNorm):
    """Adds a residual first, if it is given one."""

    def forward(self, x, residual=None):
        if residual is not None:
            x = x + residual
            return super().forward(x), x
        return super().forward(x)


class MultipliedInPlaceNorm(Scaled):
    def forward(self, x):
        y = x.float()
        y = y.div(y.pow(2).mean(-1, keepdim=True).add_(self.epsilon).sqrt_())
        return y.to(x.dtype).mul_(self.gain)


class MatrixProductNorm(Scaled):
    def forward(self, x):
        y = x.float()
        mean = (y.unsqueeze(-2) @ y.unsqueeze(-1)).squeeze(-1) / WIDTH
        return (y * (mean + self.epsilon).rsqrt()).to(x.dtype) * self.gain


class LogarithmicNorm(Scaled):
    def forward(self, x):
        y = x.float()
        return (y * torch.exp(-0.5 * torch.log(y.square().mean(-1, True) + self.epsilon))).to(x.dtype) * self.gain


class RoundedRootNorm(Scaled):
    """Rounds the root before it multiplies: the kernel rounds less."""

    def forward(self, x):
        root = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.epsilon)
        return x * root.to(x.dtype) * self.gain


class NormWithArguments(MetaNorm):
    def forward(self, x: Tensor, *args, **kwargs):
        return super().forward(x)


class TupleNorm(MetaNorm):
    def forward(self, x):
        return super().forward(x), None


class RoundedFirstZeroCentred(Scaled):
    """Rounds before it multiplies: in one dtype it is zero-centred, in two it widens what it returns."""

    def forward(self, x):
        return (1 + self.gain) * rms_norm(x, None, self.epsilon)


ROUNDED_FIRST = [
    *(MetaNorm, DividingNorm, ReciprocalNorm, LiteralNorm, InheritingNorm, DelegatingNorm),
    *(PlainNorm, EinsumNorm, LengthNorm, FluxNorm, OlmoNorm, NormByFunction),
    *(ScriptedNorm, ResidualNorm, MatrixProductNorm, LogarithmicNorm, RoundedRootNorm, NormWithArguments),
    *(TupleNorm, UnitLengthNorm, DecoratedNorm, NormOfConstants),
]
ROUNDED_LAST = [PromotedNorm, LitNorm, FunctionalNorm, EpslessNorm, TorchNorm, ChatGLMNorm, MultipliedInPlaceNorm]


class NormOfThreeDimensions(MetaNorm):
    """Has a weight with as many dimensions as what it scales."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(self.gain.data[None, None])


class GainOfThreeDimensions(MetaNorm):
    """Gives its weight as many dimensions as what it scales."""

    def forward(self, x):
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.epsilon)
        return y.to(x.dtype) * self.gain[None, None, :]


# class -> the layer that computes the same
RMS_NORMS = {
    **dict.fromkeys(ROUNDED_FIRST, "RMSNorm"),
    **dict.fromkeys(ROUNDED_LAST, "RMSNormCastLast"),
    **dict.fromkeys((UnitOffsetNorm, GemmaLikeNorm, AddcmulNorm, RoundedFirstZeroCentred), "RMSNormZeroCentered"),
    **dict.fromkeys((WeightlessNorm, OptionalWeightNorm, WeightlessEpslessNorm), "RMSNormWeightless"),
    **dict.fromkeys((BaichuanNorm,), "T5LayerNorm"),
    **dict.fromkeys((NormOfThreeDimensions, GainOfThreeDimensions), "RMSNorm"),
}
