"""The modules of transformers that make cos and sin of positions for the rotary functions."""

import functools

import torch
from torch import nn
from transformers.modeling_rope_utils import dynamic_rope_update

from kernels_ext_npu.patterns.pattern import Limits, Pattern, require
from kernels_ext_npu.patterns.reworded import reworded


class LlamaRotaryEmbedding(nn.Module):
    """A table from positions ``[B, S]`` and frequencies ``[F]`` to cos and sin ``[B, S, 2F]``, in the dtype of x."""

    @dynamic_rope_update
    def forward(self, x, position_ids):
        freqs = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float)
        emb = torch.cat((freqs, freqs), dim=-1)
        cos = emb.cos() * self.attention_scaling
        sin = emb.sin() * self.attention_scaling
        return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)


# up to transformers 5.23 tables are under torch.no_grad, which makes no difference where nothing in them is trained
UNTRAINED = require(
    lambda table: not any(parameter.requires_grad for parameter in table.parameters()),
    "it has trained parameters, and the kernel gives them no gradient",
)


def _single_type(then: Limits = lambda _: None) -> Limits:
    """Return the limits of a table with one rope type, and others behind them."""
    return require(
        lambda table: isinstance(table.rope_type, str), "its rope type is {0.rope_type!r}, not one name", then
    )


table = functools.partial(Pattern, has_gradients=False)
SINGLE = _single_type(UNTRAINED)
BY_TYPE = require(
    lambda table: isinstance(table.rope_type, dict),
    "its rope type is {0.rope_type!r}, not one for each type of layer",
    UNTRAINED,
)
# frequencies, factors and rope types of its own for each type of layer
_BY_TYPE = {
    "position_ids)": "position_ids, layer_type)",
    "    freqs = ": """
    inv_freq = getattr(self, f"{layer_type}_inv_freq")
    attention_scaling = getattr(self, f"{layer_type}_attention_scaling")
    freqs = """,
    "self.inv_freq.": "inv_freq.",
    "self.attention_scaling": "attention_scaling",
}
# in other words: cos and sin in float32; the two columns of an angle are neighbours; each angle once
IN_FLOAT32 = {"return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)": "return cos, sin"}
_NEIGHBOURS = {"torch.cat((freqs, freqs), dim=-1)": "torch.repeat_interleave(freqs, 2, dim=-1)"}
_ONCE = {"torch.cat((freqs, freqs), dim=-1)": "freqs", "dtype=x.dtype": "x.dtype"}
_ONCE_BY_TYPE = {
    "layer_type)": "layer_type=None)",
    "    emb = torch.cat((freqs, freqs), dim=-1)\n": "",
    "emb.": "freqs.",
}
# takes a type of layer, and does not use it
_ANY_TYPE = {
    "layer_type)": "layer_type=None)",
    'f"{layer_type}_inv': '"inv',
    'f"{layer_type}_attention': '"attention',
}
# frequencies are multiplied by a factor that was learned, of which alpha is the logarithm
_FREQUENCIES = "self.inv_freq.to(device=x.device, dtype=torch.float)"
_LEARNED = {
    f"    freqs = position_ids[..., None].float() * {_FREQUENCIES}": f"""
    scaled_inv_freq = {_FREQUENCIES} * self.alpha.to(device=x.device, dtype=torch.float).exp()
    freqs = position_ids[..., None].float() * scaled_inv_freq"""
}
_LLAMA = LlamaRotaryEmbedding
_TRAINED = reworded("TrainedRotaryEmbedding", _LLAMA, _LEARNED)  # since transformers 5.24
_NOT_TRAINED = reworded("MistralLarge4TextRotaryEmbedding", _TRAINED, {"@dyn": "@torch.no_grad()\n@dyn"})
_GEMMA = reworded("Gemma3RotaryEmbedding", _LLAMA, _BY_TYPE)
_DEEPSEEK_V4 = reworded("DeepseekV4RotaryEmbedding", _GEMMA, _ONCE_BY_TYPE)

PATTERNS = (
    table(_LLAMA, ("RotaryEmbedding",), SINGLE),
    table(reworded("OlmoRotaryEmbedding", _LLAMA, IN_FLOAT32), ("RotaryEmbeddingFloat32",), SINGLE),
    table(reworded("CohereRotaryEmbedding", _LLAMA, _NEIGHBOURS), ("RotaryEmbeddingInterleaved",), SINGLE),
    table(reworded("GptOssRotaryEmbedding", _LLAMA, _ONCE), ("RotaryEmbeddingHalfWidth",), SINGLE),
    Pattern(_TRAINED, ("RotaryEmbeddingTrained",), _single_type()),
    Pattern(_NOT_TRAINED, ("RotaryEmbeddingLearned",), _single_type()),
    table(_GEMMA, ("RotaryEmbeddingByType",), BY_TYPE),
    table(reworded("Olmo3RotaryEmbedding", _GEMMA, IN_FLOAT32), ("RotaryEmbeddingByTypeFloat32",), BY_TYPE),
    table(_DEEPSEEK_V4, ("RotaryEmbeddingHalfWidthByType",), BY_TYPE),
    table(reworded("EsmRotaryEmbedding", _GEMMA, _ANY_TYPE), ("RotaryEmbeddingOfAnyType",), SINGLE),
)
