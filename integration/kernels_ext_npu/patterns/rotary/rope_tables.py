"""The modules of transformers that make cos and sin of positions for the rotary functions."""

from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import dynamic_rope_update

from kernels_ext_npu.patterns.pattern import Pattern
from kernels_ext_npu.patterns.variant import variant

_ROUNDED = "return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)"


class LlamaRotaryEmbedding(nn.Module):
    """A table from positions ``[B, S]`` and frequencies ``[F]`` to cos and sin ``[B, S, 2F]``, in the dtype of x."""

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x, position_ids):
        freqs = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float)
        emb = torch.cat((freqs, freqs), dim=-1)
        cos = emb.cos() * self.attention_scaling
        sin = emb.sin() * self.attention_scaling
        return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)


@variant({_ROUNDED: "return cos, sin"})
class OlmoRotaryEmbedding(LlamaRotaryEmbedding):
    """A table whose cos and sin are in float32."""


@variant({"torch.cat((freqs, freqs), dim=-1)": "torch.repeat_interleave(freqs, 2, dim=-1)"})
class CohereRotaryEmbedding(LlamaRotaryEmbedding):
    """A table in which an angle's two columns are neighbours."""


@variant({"torch.cat((freqs, freqs), dim=-1)": "freqs", "dtype=x.dtype": "x.dtype"})
class GptOssRotaryEmbedding(LlamaRotaryEmbedding):
    """A table with each angle once: cos and sin are ``[B, S, F]``."""


class MistralLarge4TextRotaryEmbedding(nn.Module):
    """A table whose frequencies are multiplied by a factor that was learned, of which alpha is the logarithm."""

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


class Gemma3RotaryEmbedding(nn.Module):
    """A table with frequencies, factors and rope types of its own for each type of layer."""

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


@variant({_ROUNDED: "return cos, sin"})
class Olmo3RotaryEmbedding(Gemma3RotaryEmbedding):
    """A table for each type of layer, whose cos and sin are in float32."""


@variant({"layer_type)": "layer_type=None)", "    emb = torch.cat((freqs, freqs), dim=-1)\n": "", "emb.": "freqs."})
class DeepseekV4RotaryEmbedding(Gemma3RotaryEmbedding):
    """A table for each type of layer, with each angle once."""


@variant({"layer_type)": "layer_type=None)", 'f"{layer_type}_inv': '"inv', 'f"{layer_type}_attention': '"attention'})
class EsmRotaryEmbedding(Gemma3RotaryEmbedding):
    """A table that takes a type of layer, and does not use it."""


def refuse_single(module: Any) -> str | None:
    if not isinstance(module.rope_type, str):
        return f"its rope type is {module.rope_type!r}, not one name"
    return None


def refuse_by_layer_type(module: Any) -> str | None:
    if not isinstance(module.rope_type, dict):
        return f"its rope type is {module.rope_type!r}, not one for each type of layer"
    return None


PATTERNS = (
    Pattern(LlamaRotaryEmbedding, ("RotaryEmbedding",), refuse_single),
    Pattern(OlmoRotaryEmbedding, ("RotaryEmbeddingFloat32",), refuse_single),
    Pattern(CohereRotaryEmbedding, ("RotaryEmbeddingInterleaved",), refuse_single),
    Pattern(GptOssRotaryEmbedding, ("RotaryEmbeddingHalfWidth",), refuse_single),
    Pattern(Gemma3RotaryEmbedding, ("RotaryEmbeddingByType",), refuse_by_layer_type),
    Pattern(Olmo3RotaryEmbedding, ("RotaryEmbeddingByTypeFloat32",), refuse_by_layer_type),
    Pattern(DeepseekV4RotaryEmbedding, ("RotaryEmbeddingHalfWidthByType",), refuse_by_layer_type),
    Pattern(MistralLarge4TextRotaryEmbedding, ("RotaryEmbeddingLearned",), refuse_single),
    Pattern(EsmRotaryEmbedding, ("RotaryEmbeddingOfAnyType",), refuse_single),
)
