"""The modules of transformers that make cos and sin of positions for the rotary functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import dynamic_rope_update

from kernels_ext_npu.references.reference import Reference


class LlamaRotaryEmbedding(nn.Module):
    """A table from positions ``[B, S]`` and frequencies ``[F]`` to cos and sin ``[B, S, 2F]``, in the dtype of x."""

    def __init__(self, inv_freq: Tensor, attention_scaling: float = 1.0, rope_type: str = "default") -> None:
        super().__init__()
        self.inv_freq = nn.Buffer(inv_freq, persistent=False)
        self.attention_scaling = attention_scaling
        self.rope_type = rope_type

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x, position_ids):
        freqs = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float)
        emb = torch.cat((freqs, freqs), dim=-1)
        cos = emb.cos() * self.attention_scaling
        sin = emb.sin() * self.attention_scaling
        return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)


class OlmoRotaryEmbedding(LlamaRotaryEmbedding):
    """A table whose cos and sin are in float32."""

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x, position_ids):
        freqs = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float)
        emb = torch.cat((freqs, freqs), dim=-1)
        cos = emb.cos() * self.attention_scaling
        sin = emb.sin() * self.attention_scaling
        return cos, sin


class CohereRotaryEmbedding(LlamaRotaryEmbedding):
    """A table in which an angle's two columns are neighbours."""

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x, position_ids):
        freqs = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float)
        emb = torch.repeat_interleave(freqs, 2, dim=-1)
        cos = emb.cos() * self.attention_scaling
        sin = emb.sin() * self.attention_scaling
        return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)


class GptOssRotaryEmbedding(LlamaRotaryEmbedding):
    """A table with each angle once: cos and sin are ``[B, S, F]``."""

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x, position_ids):
        freqs = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float)
        emb = freqs
        cos = emb.cos() * self.attention_scaling
        sin = emb.sin() * self.attention_scaling
        return cos.to(x.dtype), sin.to(x.dtype)


class MistralLarge4TextRotaryEmbedding(LlamaRotaryEmbedding):
    """A table whose frequencies are multiplied by a factor that was learned, of which alpha is the logarithm."""

    def __init__(self, inv_freq: Tensor, attention_scaling: float = 1.0, rope_type: str = "default") -> None:
        super().__init__(inv_freq, attention_scaling, rope_type)
        self.alpha = nn.Buffer(torch.zeros_like(inv_freq))

    @torch.no_grad()
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


class EsmRotaryEmbedding(LlamaRotaryEmbedding):
    """A table that takes a type of layer, and does not use it."""

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x, position_ids, layer_type=None):
        inv_freq = getattr(self, "inv_freq")  # noqa: B009  as transformers writes it
        attention_scaling = getattr(self, "attention_scaling")  # noqa: B009
        freqs = position_ids[..., None].float() * inv_freq.to(device=x.device, dtype=torch.float)
        emb = torch.cat((freqs, freqs), dim=-1)
        cos = emb.cos() * attention_scaling
        sin = emb.sin() * attention_scaling
        return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)


class Gemma3RotaryEmbedding(nn.Module):
    """A table with frequencies, factors and rope types of its own for each type of layer."""

    def __init__(self, inv_freq: dict[str, Tensor], attention_scaling: float = 1.0, rope_type: str = "default") -> None:
        super().__init__()
        self.rope_type = dict.fromkeys(inv_freq, rope_type)
        for layer_type, frequencies in inv_freq.items():
            setattr(self, f"{layer_type}_inv_freq", nn.Buffer(frequencies, persistent=False))
            setattr(self, f"{layer_type}_attention_scaling", attention_scaling)

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x, position_ids, layer_type):
        inv_freq = getattr(self, f"{layer_type}_inv_freq")
        attention_scaling = getattr(self, f"{layer_type}_attention_scaling")
        freqs = position_ids[..., None].float() * inv_freq.to(device=x.device, dtype=torch.float)
        emb = torch.cat((freqs, freqs), dim=-1)
        cos = emb.cos() * attention_scaling
        sin = emb.sin() * attention_scaling
        return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)


class Olmo3RotaryEmbedding(Gemma3RotaryEmbedding):
    """A table for each type of layer, whose cos and sin are in float32."""

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x, position_ids, layer_type):
        inv_freq = getattr(self, f"{layer_type}_inv_freq")
        attention_scaling = getattr(self, f"{layer_type}_attention_scaling")
        freqs = position_ids[..., None].float() * inv_freq.to(device=x.device, dtype=torch.float)
        emb = torch.cat((freqs, freqs), dim=-1)
        cos = emb.cos() * attention_scaling
        sin = emb.sin() * attention_scaling
        return cos, sin


class DeepseekV4RotaryEmbedding(Gemma3RotaryEmbedding):
    """A table for each type of layer, with each angle once."""

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x, position_ids, layer_type=None):
        inv_freq = getattr(self, f"{layer_type}_inv_freq")
        attention_scaling = getattr(self, f"{layer_type}_attention_scaling")
        freqs = position_ids[..., None].float() * inv_freq.to(device=x.device, dtype=torch.float)
        cos = freqs.cos() * attention_scaling
        sin = freqs.sin() * attention_scaling
        return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)


def refuse_single(module: Any) -> str | None:
    if not isinstance(module.rope_type, str):
        return f"its rope type is {module.rope_type!r}, not one name"
    return None


def refuse_by_layer_type(module: Any) -> str | None:
    if not isinstance(module.rope_type, dict):
        return f"its rope type is {module.rope_type!r}, not one for each type of layer"
    return None


def table(module: type[nn.Module], layer: str, refuse: Callable = refuse_single) -> Reference:
    return Reference(module, (layer,), refuse, lambda instance: layer)


ROTARY_EMBEDDINGS = (
    table(LlamaRotaryEmbedding, "RotaryEmbedding"),
    table(OlmoRotaryEmbedding, "RotaryEmbeddingFloat32"),
    table(CohereRotaryEmbedding, "RotaryEmbeddingInterleaved"),
    table(GptOssRotaryEmbedding, "RotaryEmbeddingHalfWidth"),
    table(Gemma3RotaryEmbedding, "RotaryEmbeddingByType", refuse_by_layer_type),
    table(Olmo3RotaryEmbedding, "RotaryEmbeddingByTypeFloat32", refuse_by_layer_type),
    table(DeepseekV4RotaryEmbedding, "RotaryEmbeddingHalfWidthByType", refuse_by_layer_type),
    table(MistralLarge4TextRotaryEmbedding, "RotaryEmbeddingLearned"),
    table(EsmRotaryEmbedding, "RotaryEmbeddingOfAnyType"),
)
