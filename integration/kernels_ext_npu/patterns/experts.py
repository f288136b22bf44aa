"""The experts of transformers whose weights are one tensor for each projection.

transformers' ``use_experts_implementation`` gives most such classes one forward, which calls an implementation by the
name in the model's config. What a class computes is said by the flags that the decorator sets on its instances, and by
its ``_apply_gate``; the decorator itself is the pattern (matching/fingerprint.py). Others have no such interface, and
Llama 4's are served as a block with their router, since they see every token.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation

from kernels_ext_npu.module_state import COMPUTED, static_getattr
from kernels_ext_npu.patterns.gated_mlps import LlamaMLP
from kernels_ext_npu.patterns.pattern import Part, Pattern
from kernels_ext_npu.patterns.softmax_routers import Llama4Router


@use_experts_implementation
class Experts(nn.Module):
    """The weighted sum over the chosen experts of ``down(act(gate(x)) * up(x))``: the decorator computes it."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        raise NotImplementedError


class _WithWeights(nn.Module):
    """The members of experts, of which each reads some, with weights of zeros."""

    shapes: Any = staticmethod(lambda e, h, i: {})

    def __init__(self, hidden_size: int, num_experts: int, intermediate_size: int) -> None:
        super().__init__()
        self.hidden_size, self.num_experts, self.ffn_hidden_size = hidden_size, num_experts, intermediate_size
        self.act_fn = self.activation_fn = ACT2FN["silu"]
        for name, shape in self.shapes(num_experts, hidden_size, intermediate_size).items():
            setattr(self, name, nn.Parameter(torch.zeros(shape)))


class Step3p7Experts(_WithWeights):
    shapes = staticmethod(lambda e, h, i: {"gate_up_proj": (e, 2 * i, h), "down_proj": (e, h, i)})
    limit = 7.0

    def forward(self, hidden_states, top_k_index, top_k_weights):
        final = torch.zeros_like(hidden_states)
        with torch.no_grad():
            mask = F.one_hot(top_k_index, num_classes=self.num_experts + 1).permute(2, 1, 0)
            hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for expert_idx in hit:
            expert_idx = expert_idx[0]
            if expert_idx == self.num_experts:
                continue
            top_k_pos, token_idx = torch.where(mask[expert_idx])
            current = self._apply_gate(F.linear(hidden_states[token_idx], self.gate_up_proj[expert_idx]))
            current = F.linear(current, self.down_proj[expert_idx]) * top_k_weights[token_idx, top_k_pos, None]
            final.index_add_(0, token_idx, current.to(final.dtype))
        return final

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        gate = self.act_fn(gate).clamp(max=self.limit)
        up = up.clamp(min=-self.limit, max=self.limit)
        return gate * up


class DbrxExpertGLU(_WithWeights):
    shapes = staticmethod(lambda e, h, i: dict.fromkeys(("w1", "v1", "w2"), (e * i, h)))

    def forward(self, x, expert_w1, expert_v1, expert_w2):
        gate_proj = x.matmul(expert_w1.T)
        up_proj = x.matmul(expert_v1.T)
        gate_proj = self.activation_fn(gate_proj)
        intermediate_states = gate_proj * up_proj
        return intermediate_states.matmul(expert_w2)


class DbrxExperts(_WithWeights):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.mlp = DbrxExpertGLU(*sizes)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        batch_size = hidden_states.shape[0]
        hidden_states = hidden_states.reshape(-1, self.hidden_size)
        next_states = torch.zeros_like(hidden_states, dtype=hidden_states.dtype, device=hidden_states.device)
        with torch.no_grad():
            expert_mask = torch.nn.functional.one_hot(top_k_index, num_classes=self.num_experts + 1)
            expert_mask = expert_mask.permute(2, 1, 0)
            expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()
        split_expert_shape = (-1, self.ffn_hidden_size, self.hidden_size)
        for expert_idx in expert_hit:
            expert_idx = expert_idx[0]
            with torch.no_grad():
                idx, token_idx = torch.where(expert_mask[expert_idx])
            v1 = self.mlp.v1.view(split_expert_shape)[expert_idx]
            w1 = self.mlp.w1.view(split_expert_shape)[expert_idx]
            w2 = self.mlp.w2.view(split_expert_shape)[expert_idx]
            states = self.mlp(hidden_states[token_idx], w1, v1, w2)
            states = states.view(-1, self.hidden_size) * top_k_weights[token_idx, idx, None]
            next_states.index_add_(0, token_idx, states)
        return next_states.view(batch_size, -1, self.hidden_size)


class Llama4TextExperts(_WithWeights):
    shapes = staticmethod(lambda e, h, i: {"gate_up_proj": (e, h, 2 * i), "down_proj": (e, i, h)})

    def forward(self, hidden_states):
        hidden_states = hidden_states.view(self.gate_up_proj.shape[0], -1, self.hidden_size)
        gate_up = torch.bmm(hidden_states, self.gate_up_proj)
        gate, up = gate_up.chunk(2, dim=-1)
        next_states = torch.bmm((up * self.act_fn(gate)), self.down_proj)
        return next_states.view(-1, self.hidden_size)


class Llama4TextMoe(nn.Module):
    def __init__(self, hidden_size: int, num_experts: int, intermediate_size: int, top_k: int = 1) -> None:
        super().__init__()
        self.hidden_dim = hidden_size
        self.experts = Llama4TextExperts(hidden_size, num_experts, intermediate_size)
        self.router = Llama4Router(hidden_size, num_experts, top_k)
        self.shared_expert = LlamaMLP(hidden_size, intermediate_size)

    def forward(self, hidden_states):
        hidden_states = hidden_states.reshape(-1, self.hidden_dim)
        router_scores, router_logits = self.router(hidden_states)
        routed_in = hidden_states.repeat(router_scores.shape[1], 1)
        routed_in = routed_in * router_scores.transpose(0, 1).reshape(-1, 1)
        routed_out = self.experts(routed_in)
        out = self.shared_expert(hidden_states)
        out.add_(routed_out.reshape(router_scores.shape[1], -1, routed_out.shape[-1]).sum(dim=0))
        return out, router_logits


def _refuse_called_by_name(module: Any) -> str | None:
    first = "gate_up_proj" if module.has_gate else "up_proj"
    for name in (first, "down_proj"):
        weight = static_getattr(module, name)
        if weight is not COMPUTED and type(weight) not in (nn.Parameter, torch.Tensor, FakeTensor, DTensor):
            return f"its {name} is a {type(weight).__name__}"
    return None


def _refuse_weights(experts: Any, names: Sequence[str] = ("gate_up_proj", "down_proj")) -> str | None:
    others = [name for name in names if type(experts._parameters.get(name)) not in (nn.Parameter, FakeTensor)]
    return f"its {others[0]} is no plain weight" if others else None


_MLP = Part("mlp", (DbrxExpertGLU,), "its mlp is a {}")
_EXPERTS = Part("experts", (Llama4TextExperts,), "its experts are {}")
_ROUTER = Part("router", (Llama4Router,), "its router is a {}", is_called=True)

PATTERNS = (
    Pattern(Experts, ("MoEExperts",), _refuse_called_by_name),
    Pattern(Step3p7Experts, ("ClampedExperts",), _refuse_weights),
    Pattern(DbrxExperts, ("FlatExperts",), lambda m: _refuse_weights(m.mlp, ("w1", "v1", "w2")), parts=(_MLP,)),
    Pattern(Llama4TextMoe, ("ScaledTokensMoEBlock",), lambda m: _refuse_weights(m.experts), parts=(_EXPERTS, _ROUTER)),
)
