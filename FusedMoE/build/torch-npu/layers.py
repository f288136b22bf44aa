"""Layers whose forward `kernels` binds to modules of transformers. They read the weights of what they replace."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from .experts import experts_forward
from .router import softmax_top_k


class _Layer(nn.Module):
    can_torch_compile = True
    has_backward = True


class MoEExperts(_Layer):
    """Experts whose weights are one tensor for each projection: every class with transformers' experts interface."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)


class SoftmaxTopKRouter(_Layer):
    """Experts by softmax, as in Qwen3-MoE: weights divided by their sum unless ``norm_topk_prob`` is false."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, experts = _route(self, hidden_states)
        return logits, weights.to(logits.dtype), experts


class SoftmaxTopKRouterFloat32(_Layer):
    """The same with weights that stay in float32, as in Mixtral."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _route(self, hidden_states)


def _route(router: nn.Module, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = F.linear(hidden_states.reshape(-1, router.hidden_dim), router.weight)
    return logits, *softmax_top_k(logits, router.top_k, getattr(router, "norm_topk_prob", True))
