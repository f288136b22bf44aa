"""Gated MLPs in other people's words."""

import functools
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from tests.integration.recognition.spellings.other_peoples_norms import WIDTH

INNER = 96


class Projected(nn.Module):
    """The projections of a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.w2 = nn.Linear(INNER, WIDTH, bias=False)


class MetaMLP(Projected):
    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class MLPOfRows(Projected):
    """Takes rows side by side too."""

    def forward(self, x):
        rows = x.reshape(-1, WIDTH)
        return self.w2(F.silu(self.w1(rows)) * self.w3(rows)).view(x.shape)


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


class UpFirstByName(Projected):
    """Names as Qwen's first release has them."""

    def forward(self, hidden_states):
        a1 = self.w1(hidden_states)
        a2 = self.w3(hidden_states)
        intermediate_parallel = a1 * F.silu(a2)
        return self.w2(intermediate_parallel)


class ByTable(ByModule):
    """Finds its activation by name, as remote code of transformers does."""

    def __init__(self, name: str = "silu") -> None:
        super().__init__(ACT2FN[name])

    def forward(self, x):
        return self.w2(self.activation(self.w1(x)) * self.w3(x))


class ByTableWithTanh(ByTable):
    def __init__(self) -> None:
        super().__init__("gelu_pytorch_tanh")


class ByTableInForward(Projected):
    act = "silu"

    def forward(self, x):
        return self.w2(ACT2FN[self.act](self.w1(x)) * self.w3(x))


class ByLambda(Projected):
    def __init__(self) -> None:
        super().__init__()
        self.act = lambda x: F.gelu(x, approximate="tanh")

    def forward(self, x):
        return self.w2(self.act(self.w1(x)) * self.w3(x))


class ByPartial(Projected):
    def __init__(self) -> None:
        super().__init__()
        self.act = functools.partial(F.gelu, approximate="tanh")

    def forward(self, x):
        return self.w2(self.act(self.w1(x)) * self.w3(x))


@dataclass
class Config:
    act: str = "gelu"
    approximate: str = "none"


class ByConfig(Projected):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config()

    def forward(self, x):
        gate = getattr(F, self.config.act)(self.w1(x), approximate=self.config.approximate)
        return self.w2(gate * self.w3(x))


class ByFormula(Projected):
    def forward(self, x):
        gate = self.w1(x)
        gate = 0.5 * gate * (1 + torch.tanh(0.7978845608028654 * (gate + 0.044715 * gate.pow(3))))
        return self.w2(torch.einsum("...i,...i->...i", gate, self.w3(x)))


class InPlace(Projected):
    def forward(self, x):
        return self.w2(F.silu(self.w1(x), inplace=True).mul_(self.w3(x)))


class Flattened(Projected):
    def forward(self, hidden_states):
        shape = hidden_states.shape
        hidden_states = hidden_states.reshape(-1, shape[-1])
        return self.w2(F.silu(self.w1(hidden_states)) * self.w3(hidden_states)).view(shape)


class InTuple(Projected):
    def forward(self, x, attention_mask=None, **kwargs):
        return self.w2(F.silu(self.w1(x)) * self.w3(x)), None


class Sliced(Packed):
    def forward(self, x):
        both = self.c_fc(x)
        return self.c_proj(F.silu(both[..., :INNER]) * both[..., INNER:])


class SplitBySizes(Packed):
    def forward(self, x):
        gate, up = torch.split(self.c_fc(x), [INNER, INNER], dim=-1)
        return self.c_proj(F.silu(gate) * up)


class Unbound(Packed):
    def forward(self, x):
        gate, up = self.c_fc(x).unflatten(-1, (2, -1)).unbind(dim=-2)
        return self.c_proj(F.silu(gate).mul(up))


SWIGLUS = (ByFunction, MetaMLP, UpFirst, BySigmoid, ByModule, InFloat32, WithBiases, Helped)
SWIGLUS += (UpFirstByName, ByTable, ByTableInForward, InPlace, Flattened, InTuple)
PLAIN_MLPS = {
    **dict.fromkeys(SWIGLUS, "SwiGLUMLP"),
    **dict.fromkeys((TanhGated, TanhByModule, ByTableWithTanh, ByLambda, ByPartial, ByFormula), "GeGLUMLP"),
    **dict.fromkeys((ExactlyGated, ByConfig), "ExactGeGLUMLP"),
    **dict.fromkeys((Packed, Sliced, SplitBySizes, Unbound), "FusedSwiGLUMLP"),
}
