"""Write the forwards of LLaMA-Factory's NPU kernels in our words: ours are compared with them.

https://github.com/hiyouga/LLaMA-Factory/tree/ff6d4d12eeb035d6ce06805a5733dd7b29f2ac30 (Apache 2.0), in
src/llamafactory/v1/plugins/model_plugins/kernels/ops: rms_norm/npu_rms_norm.py, mlp/npu_swiglu.py, rope/npu_rope.py and
mlp/npu_fused_moe.py. Each calls the same functions with the same arguments, positional and by keyword, in the same
order.
"""

import torch
import torch_npu
from torch import Tensor, nn
from torch.nn import functional as F


def _eps(norm: nn.Module) -> float:
    return getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", 1e-6)


def rms_norm(self: nn.Module, hidden_states: Tensor) -> Tensor:
    eps, weight = _eps(self), getattr(self, "weight", None)
    if weight is None:
        raise RuntimeError("a norm without weight")
    scale = weight.float()
    return torch_npu.npu_rms_norm(hidden_states, scale.to(hidden_states.dtype), epsilon=eps)[0]


def zero_centred_rms_norm(self: nn.Module, hidden_states: Tensor) -> Tensor:
    eps, weight = _eps(self), getattr(self, "weight", None)
    if weight is None:
        raise RuntimeError("a norm without weight")
    scale = 1.0 + weight.float()
    return torch_npu.npu_rms_norm(hidden_states, scale.to(hidden_states.dtype), epsilon=eps)[0]


def gated_rms_norm(self: nn.Module, hidden_states: Tensor, gate: Tensor) -> Tensor:
    dtype = hidden_states.dtype
    x = hidden_states.to(torch.float32)
    x = torch_npu.npu_rms_norm(x, self.weight.float(), epsilon=_eps(self))[0]
    return (x * F.silu(gate.to(torch.float32))).to(dtype)


def swiglu_mlp(self: nn.Module, x: Tensor) -> Tensor:
    both = torch.cat((self.gate_proj(x), self.up_proj(x)), dim=-1)
    return self.down_proj(torch_npu.npu_swiglu(both, dim=-1))


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    if cos.shape[-1] < q.shape[-1]:
        raise NotImplementedError("heads that are rotated in part")
    q_rotated = torch_npu.npu_rotary_mul(q, cos, sin, "half").to(q.dtype)
    k_rotated = torch_npu.npu_rotary_mul(k, cos, sin, "half").to(k.dtype)
    return q_rotated, k_rotated


class GroupedMatmul(torch.autograd.Function):
    """Multiply in groups; the gradient of a weight stored as ``[E, N, K]`` comes out as ``[E, K, N]``."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        return _product([x], [weight], counts, 2, 0)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return _product([grad], [weight.mT], ctx.counts, 2, 0), _product([x.T], [grad], ctx.counts, 3, 2), None


def _product(x: list[Tensor], weight: list[Tensor], counts: Tensor, split_item: int, group_type: int) -> Tensor:
    options = {"split_item": split_item, "group_type": group_type, "group_list_type": 1}
    return torch_npu.npu_grouped_matmul(x, weight, bias=None, group_list=counts, **options)[0]


def experts(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute experts with every step a node of autograd, which keeps what it wants."""
    x = hidden_states.reshape(-1, self.hidden_dim)
    rows, order = torch_npu.npu_moe_token_permute(x, top_k_index.to(torch.int32))
    counts = torch.histc(top_k_index.float(), bins=self.num_experts, min=0, max=self.num_experts).long()
    gate_up_proj, down_proj = self.gate_up_proj.transpose(1, 2), self.down_proj.transpose(1, 2)
    rows = torch_npu.npu_swiglu(GroupedMatmul.apply(rows, gate_up_proj, counts), dim=-1)
    rows = GroupedMatmul.apply(rows, down_proj, counts)
    return torch_npu.npu_moe_token_unpermute(rows, order, probs=top_k_weights)
