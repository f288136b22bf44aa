"""Gated MLPs in other people's words that do more than multiply: they drop out, norm, clamp or scale; and less."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from tests.integration.recognition.spellings.other_peoples_mlps import INNER, MetaMLP, Packed, Projected
from tests.integration.recognition.spellings.other_peoples_norms import WIDTH


class Halved(MetaMLP):
    def forward(self, x):
        return 0.5 * super().forward(x)


class DroppedInside(Projected):
    def forward(self, x):
        return self.w2(F.dropout(F.silu(self.w1(x)) * self.w3(x), 0.1, self.training))


class Normed(Projected):
    """Has a norm before its last projection, as EVA has."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.ffn_ln, self.drop = nn.SiLU(), nn.LayerNorm(INNER), nn.Dropout(0.0)

    def forward(self, x):
        hidden = self.act(self.w1(x)) * self.w3(x)
        x = self.ffn_ln(hidden)
        x = self.w2(x)
        return self.drop(x)


class Dropping(Projected):
    """Drops out twice, as timm's does."""

    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        self.act, self.drop1, self.norm, self.drop2 = nn.SiLU(), nn.Dropout(p), nn.Identity(), nn.Dropout(p)

    def forward(self, x):
        x_gate = self.w1(x)
        x = self.w3(x)
        x = self.act(x_gate) * x
        x = self.drop1(x)
        x = self.norm(x)
        x = self.w2(x)
        return self.drop2(x)


class NotDropping(Dropping):
    def __init__(self) -> None:
        super().__init__(0.0)


class NormedAndDropping(Dropping):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(INNER)


class DroppingInTheEnd(Projected):
    residual_dropout = 0.1

    def forward(self, x):
        y = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return F.dropout(y, p=self.residual_dropout, training=self.training)


class T5Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wi_0, self.wi_1 = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.wo, self.dropout = nn.Linear(INNER, WIDTH, bias=False), nn.Dropout(0.1)

    def forward(self, hidden_states):
        hidden_gelu = F.gelu(self.wi_0(hidden_states), approximate="tanh")
        return self.wo(self.dropout(hidden_gelu * self.wi_1(hidden_states)))


class NormedFirst(Projected):
    """Norms what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        x = self.norm(x)
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class ClampedBoth(Projected):
    def __init__(self, limit: float = 0.7) -> None:
        super().__init__()
        self.swiglu_limit = limit

    def forward(self, x):
        gate, up = self.w1(x), self.w3(x)
        gate = torch.clamp(gate, max=self.swiglu_limit)
        up = torch.clamp(up, min=-self.swiglu_limit, max=self.swiglu_limit)
        return self.w2(up * (gate * torch.sigmoid(gate)))


class Scaling(Projected):
    gate_scale, out_scale = 0.75, 0.5

    def forward(self, x):
        y = F.silu(self.gate_scale * self.w1(x)) * self.w3(x)
        return self.w2(y) * self.out_scale


class Viewed(Packed):
    """Drops out, as ModernBERT does."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        both = self.c_fc(x).view(*x.shape[:-1], 2, INNER)
        return self.c_proj(self.drop(F.gelu(both[..., 0, :]) * both[..., 1, :]))


class Linear(nn.Module):
    """A linear layer of one's own, without the names of torch's."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(d_out, d_in) * d_in**-0.5)

    def forward(self, x):
        return x @ self.w.T


class StudentsMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w2, self.w1, self.w3 = Linear(INNER, WIDTH), Linear(WIDTH, INNER), Linear(WIDTH, INNER)

    def forward(self, x):
        hidden = self.w1(x)
        return self.w2(hidden * torch.sigmoid(hidden) * self.w3(x))


class LinearWithAdapter(Linear):
    """Has a pair of matrices beside its weight, as torchtune's layers with LoRA have."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__(d_in, d_out)
        self.lora_a, self.lora_b = nn.Linear(d_in, 4, bias=False), nn.Linear(4, d_out, bias=False)

    def forward(self, x):
        return super().forward(x) + 2 * self.lora_b(self.lora_a(x))


class WithAdapters(StudentsMLP):
    def __init__(self) -> None:
        super().__init__()
        self.w2, self.w1 = LinearWithAdapter(INNER, WIDTH), LinearWithAdapter(WIDTH, INNER)


class WithConv1D(nn.Module):
    """Multiplies as GPT-2 does."""

    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_fc2, self.c_proj = Conv1D(INNER, WIDTH), Conv1D(INNER, WIDTH), Conv1D(WIDTH, INNER)
        self.act = nn.SiLU()

    def forward(self, hidden_states):
        return self.c_proj(self.c_fc2(hidden_states) * self.act(self.c_fc(hidden_states)))


class Gating(nn.Module):
    """Has its last projection elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.value_proj = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)

    def forward(self, x):
        return self.value_proj(x) * F.silu(self.gate_proj(x))


class GatingByOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, 2 * INNER)

    def forward(self, hidden_states):
        gate, hidden_states = self.proj(hidden_states).chunk(2, dim=-1)
        return F.gelu(gate) * hidden_states


class GatingByTheLast(GatingByOne):
    """Has its gate behind, as that of diffusion models has."""

    def forward(self, hidden_states):
        hidden_states, gate = self.proj(hidden_states).chunk(2, dim=-1)
        return hidden_states * F.gelu(gate)


class TanhGatedByTheLast(Packed):
    def forward(self, x):
        up, gate = self.c_fc(x).split(INNER, dim=-1)
        return self.c_proj(F.gelu(gate, approximate="tanh") * up)


class InSequences(nn.Module):
    """Has its gate and its activation in a container, and drops out twice by one module, as umT5 of Wan does."""

    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(WIDTH, INNER, bias=False), nn.GELU(approximate="tanh"))
        self.fc1, self.fc2 = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False)
        self.dropout = nn.Dropout(p)

    def forward(self, x):
        x = self.dropout(self.fc1(x) * self.gate(x))
        return self.dropout(self.fc2(x))


class InSequencesNotDropping(InSequences):
    def __init__(self) -> None:
        super().__init__(0.0)


class EndingInASequence(Projected):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Sequential(nn.SiLU(), nn.Identity())
        self.w2 = nn.Sequential(nn.LayerNorm(INNER), nn.Linear(INNER, WIDTH), nn.Dropout(0.1))

    def forward(self, x):
        return self.w2(self.act(self.w1(x)) * self.w3(x))


class InList(nn.Module):
    """Holds its projections in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList([nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)])

    def forward(self, x):
        gate, up = (projection(x) for projection in self.projections[:2])
        return self.projections[2](F.silu(gate) * up)


class InDictionary(nn.Module):
    """Holds them, and its activation, by names."""

    def __init__(self) -> None:
        super().__init__()
        parts = {"fc": nn.Linear(WIDTH, 2 * INNER), "act": nn.GELU(approximate="tanh"), "proj": nn.Linear(INNER, WIDTH)}
        self.parts = nn.ModuleDict(parts)

    def forward(self, x):
        gate, up = self.parts["fc"](x).chunk(2, dim=-1)
        return self.parts.proj(self.parts["act"](gate) * up)


def dropout_add(x, residual, p, training):
    return residual + F.dropout(x, p=p, training=training)


class AddingWhatIsLeft(Projected):
    """Is given a residual to add, as TeleChat's is."""

    hidden_dropout = 0.1

    def forward(self, hidden_states, residual):
        y = self.w2(F.silu(self.w1(hidden_states)) * self.w3(hidden_states))
        return dropout_add(y, residual, self.hidden_dropout, self.training)


class GatedByTheLastAndDropping(Packed):
    """Drops out what a gate behind makes, as that of gte-multilingual does."""

    def __init__(self) -> None:
        super().__init__()
        self.act_fn, self.hidden_dropout = nn.GELU(), nn.Dropout(0.1)

    def forward(self, hidden_states):
        up_states, gate = torch.split(self.c_fc(hidden_states), INNER, dim=-1)
        return self.c_proj(self.hidden_dropout(self.act_fn(gate) * up_states))


class OfBatches(Projected):
    """Wants three dimensions."""

    def forward(self, x):
        b, s, d = x.shape
        x = x.reshape(b * s, d)
        return self.w2(F.silu(self.w1(x)) * self.w3(x)).reshape(b, s, d)


LONGER_MLPS = {
    **dict.fromkeys((StudentsMLP, WithAdapters, WithConv1D, Gating, OfBatches), "SwiGLUMLP"),
    **dict.fromkeys((GatingByOne, GatingByTheLast, GatedByTheLastAndDropping), "FusedExactGeGLUMLP"),
    TanhGatedByTheLast: "FusedGeGLUMLP",
    **dict.fromkeys((NotDropping, DroppingInTheEnd, NormedFirst), "SwiGLUMLP"),
    **dict.fromkeys((Normed, NormedAndDropping), "NormedMLP"),
    **dict.fromkeys((DroppedInside, Dropping, T5Dense, InSequences), "DropoutMLP"),
    InSequencesNotDropping: "GeGLUMLP",
    EndingInASequence: "NormedMLP",
    InList: "SwiGLUMLP",
    InDictionary: "FusedGeGLUMLP",
    AddingWhatIsLeft: "SwiGLUMLP",
    **dict.fromkeys((Halved, Scaling), "ScaledSwiGLUMLP"),
    ClampedBoth: "ClampedSwiGLUMLP",
    Viewed: "FusedDropoutMLP",
}
