"""What layers take the place of in some of the supported releases of transformers alone, as those have it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_rope_utils import dynamic_rope_update


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def rotate_channel_pairs(x):
    x = x.view(*x.shape[:-1], -1, 2)
    x1, x2 = x.unbind(dim=-1)
    return torch.stack((-x2, x1), dim=-1).flatten(start_dim=-2)


def apply_rotary_pos_emb_vision(q, k, cos, sin):
    """Rotate q and k ``[..., S, N, D]`` in float32, by cos and sin ``[S, D]``; both keep their dtypes."""
    orig_q_dtype = q.dtype
    orig_k_dtype = k.dtype
    q, k = q.float(), k.float()
    cos, sin = cos.unsqueeze(-2).float(), sin.unsqueeze(-2).float()
    q_embed = (q * cos) + (rotate_channel_pairs(q) * sin)
    k_embed = (k * cos) + (rotate_channel_pairs(k) * sin)
    return q_embed.to(orig_q_dtype), k_embed.to(orig_k_dtype)


def apply_multimodal_rotary_pos_emb(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
    """Compose cos and sin of time, height and width, as embeddings do by now, and rotate by them."""
    mrope_section = mrope_section * 2
    cos = torch.cat([m[i % 3] for i, m in enumerate(cos.split(mrope_section, dim=-1))], dim=-1).unsqueeze(unsqueeze_dim)
    sin = torch.cat([m[i % 3] for i, m in enumerate(sin.split(mrope_section, dim=-1))], dim=-1).unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


class Inkling2TopKRouter(nn.Module):
    def forward(self, hidden_states):
        hidden_states = hidden_states.float()
        flat = hidden_states.reshape(-1, self.hidden_dim)
        logits = F.linear(flat, self.weight)
        scores = self.score_fn(logits)
        indices = torch.topk(scores + self.e_score_correction_bias, self.top_k, dim=-1, sorted=False).indices
        weights = scores.gather(1, indices)
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return logits, weights * self.routed_scaling_factor, indices


class LaraMiniTopKRouter(nn.Module):
    def forward(self, hidden_states):
        hidden_states = hidden_states.reshape(-1, self.hidden_dim)
        router_logits = F.linear(hidden_states.float(), self.weight.float())
        router_probs = F.softmax(router_logits, dim=-1)
        router_top_value, router_indices = torch.topk(router_probs, self.top_k, dim=-1)
        if self.norm_topk_prob:
            router_top_value = router_top_value / router_top_value.sum(dim=-1, keepdim=True)
        router_scores = router_top_value.to(hidden_states.dtype)
        return router_logits, router_scores, router_indices


class MixtralBlockSparseTop2MLP(nn.Module):
    def forward(self, hidden_states):
        current_hidden_states = self.act_fn(self.w1(hidden_states)) * self.w3(hidden_states)
        return self.w2(current_hidden_states)


class Inkling2UnweightedRMSNorm(nn.Module):
    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.float()
        hidden_states = hidden_states * torch.rsqrt(hidden_states.square().mean(-1, keepdim=True) + self.eps)
        return hidden_states.to(input_dtype)


class MambaRMSNormGated(nn.Module):
    def forward(self, hidden_states, gate=None):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        if gate is not None:
            hidden_states = hidden_states * nn.functional.silu(gate.to(torch.float32))
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class TrainedRotaryEmbedding(nn.Module):
    @dynamic_rope_update
    def forward(self, x, position_ids):
        scaled_inv_freq = (
            self.inv_freq.to(device=x.device, dtype=torch.float)
            * self.alpha.to(device=x.device, dtype=torch.float).exp()
        )
        freqs = position_ids[..., None].float() * scaled_inv_freq
        emb = torch.cat((freqs, freqs), dim=-1)
        cos = emb.cos() * self.attention_scaling
        sin = emb.sin() * self.attention_scaling
        return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)


class LearnedRotaryEmbedding(nn.Module):
    forward = torch.no_grad()(TrainedRotaryEmbedding.forward)


# by their names in matching/known_forwards.json
ORIGINALS: dict[str, Any] = {
    "inkling2:apply_rotary_pos_emb_vision": apply_rotary_pos_emb_vision,
    "qwen2_vl:apply_multimodal_rotary_pos_emb": apply_multimodal_rotary_pos_emb,
    "inkling2:Inkling2UnweightedRMSNorm": Inkling2UnweightedRMSNorm,
    "mamba2:MambaRMSNormGated@5.22": MambaRMSNormGated,
    "inkling2:Inkling2TopKRouter": Inkling2TopKRouter,
    "lara_mini:LaraMiniTopKRouter": LaraMiniTopKRouter,
    "mixtral:MixtralBlockSparseTop2MLP": MixtralBlockSparseTop2MLP,
    "mistral_large4:MistralLarge4TextRotaryEmbedding@5.24": TrainedRotaryEmbedding,
    "mistral_large4:MistralLarge4TextRotaryEmbedding@5.22": LearnedRotaryEmbedding,
}
