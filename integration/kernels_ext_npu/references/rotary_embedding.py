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


def _refuse_single(module: Any) -> str | None:
    if not isinstance(module.rope_type, str):
        return f"its rope type is {module.rope_type!r}, not one name"
    return _refuse_type(module.rope_type, module.attention_scaling)


def _refuse_by_layer_type(module: Any) -> str | None:
    """Return why one type of layer cannot be served; None if all can.

    It keeps the module for the others too: a forward is swapped for all of them.
    """
    if not isinstance(module.rope_type, dict):
        return f"its rope type is {module.rope_type!r}, not one for each type of layer"
    types = module.rope_type.items()
    reasons = (_refuse_type(kind, getattr(module, f"{name}_attention_scaling")) for name, kind in types)
    return next((reason for reason in reasons if reason is not None), None)


def _refuse_type(rope_type: str, scaling: float) -> str | None:
    """Return why a rope type cannot be served; None if it can.

    Served are frequencies that stay, for which the decorator of transformers does nothing, and the factor 1.
    """
    if "dynamic" in rope_type or rope_type == "longrope":
        return f"its frequencies change with the length ({rope_type})"
    if scaling != 1:
        return f"its rope type is {rope_type}: cos and sin are scaled by {scaling:.4g}"
    return None


def _table(module: type[nn.Module], layer: str, refuse: Callable = _refuse_single) -> Reference:
    return Reference(module, (layer,), refuse, lambda instance: layer)


ROTARY_EMBEDDINGS = (
    _table(LlamaRotaryEmbedding, "RotaryEmbedding"),
    _table(OlmoRotaryEmbedding, "RotaryEmbeddingFloat32"),
    _table(CohereRotaryEmbedding, "RotaryEmbeddingInterleaved"),
    _table(GptOssRotaryEmbedding, "RotaryEmbeddingHalfWidth"),
    _table(Gemma3RotaryEmbedding, "RotaryEmbeddingByType", _refuse_by_layer_type),
    _table(Olmo3RotaryEmbedding, "RotaryEmbeddingByTypeFloat32", _refuse_by_layer_type),
)
