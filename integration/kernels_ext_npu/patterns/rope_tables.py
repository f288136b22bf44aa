"""The modules of transformers that make cos and sin of positions for the rotary functions.

Those of positions of several dimensions, in images and beside them, compute cos and sin of every position, and choose
from both what belongs to a frequency. How is a method of each, ``recomposition_frequencies``, which the kernel asks,
too: no pattern has to know it.
"""

import functools
import inspect
import math
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers.modeling_rope_utils import dynamic_rope_update

from kernels_ext_npu.patterns.pattern import Limits, Pattern, require, reworded


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
_UNTRAINED = require(
    lambda table: not any(parameter.requires_grad for parameter in table.parameters()),
    "it has trained parameters, and the kernel gives them no gradient",
)


def _single_type(then: Limits = lambda _: None) -> Limits:
    """Return the limits of a table with one rope type, and others behind them."""
    return require(
        lambda table: isinstance(table.rope_type, str), "its rope type is {0.rope_type!r}, not one name", then
    )


_table = functools.partial(Pattern, has_gradients=False)
_SINGLE = _single_type(_UNTRAINED)
_BY_TYPE = require(
    lambda table: isinstance(table.rope_type, dict),
    "its rope type is {0.rope_type!r}, not one for each type of layer",
    _UNTRAINED,
)
# frequencies, factors and rope types of its own for each type of layer
_EACH_TYPE = {
    "position_ids)": "position_ids, layer_type)",
    "    freqs = ": """
    inv_freq = getattr(self, f"{layer_type}_inv_freq")
    attention_scaling = getattr(self, f"{layer_type}_attention_scaling")
    freqs = """,
    "self.inv_freq.": "inv_freq.",
    "self.attention_scaling": "attention_scaling",
}
# in other words: cos and sin in float32; the two columns of an angle are neighbours; each angle once
_IN_FLOAT32 = {"return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)": "return cos, sin"}
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
_GEMMA = reworded("Gemma3RotaryEmbedding", _LLAMA, _EACH_TYPE)
_DEEPSEEK_V4 = reworded("DeepseekV4RotaryEmbedding", _GEMMA, _ONCE_BY_TYPE)


# ---- positions of several dimensions ---------------------------------------------------------------------------------
class Qwen2_5_VLRotaryEmbedding(nn.Module):
    """A table of positions ``[3, B, S]``: sections of the frequencies go by time, height and width."""

    mrope_section: tuple[int, ...] = (4, 4, 4)

    @dynamic_rope_update
    def forward(self, x, position_ids):
        position_ids = position_ids.expand(3, -1, -1)
        freqs = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float)
        cos = freqs.cos() * self.attention_scaling
        sin = freqs.sin() * self.attention_scaling
        sin = self.recomposition_frequencies(sin)
        cos = self.recomposition_frequencies(cos)
        return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)

    def recomposition_frequencies(self, freq):
        freq = torch.cat([m[i % 3] for i, m in enumerate(freq.split(self.mrope_section, dim=-1))], dim=-1)
        return torch.cat((freq, freq), dim=-1)


_QWEN = Qwen2_5_VLRotaryEmbedding
_BY_SECTIONS = {"expand(3,": "expand(len(self.mrope_section),", "dtype=x.dtype": "x.dtype"}  # a dimension for each
_ERNIE = reworded("Ernie4_5_VLMoeTextRotaryEmbedding", _QWEN, _IN_FLOAT32)
_HUNYUAN = reworded("HunYuanVLRotaryEmbedding", _QWEN, _BY_SECTIONS)
_HUNYUAN.mrope_section = (3, 3, 3, 3)


class CohereCompassRotaryEmbedding(nn.Module):
    """A table for each type of layer, which has sections of its own too."""

    @dynamic_rope_update
    def forward(self, x, position_ids, layer_type=None):
        inv_freq = getattr(self, f"{layer_type}_inv_freq")
        attention_scaling = getattr(self, f"{layer_type}_attention_scaling")
        position_ids = position_ids.expand(3, -1, -1)
        freqs = position_ids[..., None].float() * inv_freq.to(device=x.device, dtype=torch.float)
        cos = freqs.cos() * attention_scaling
        sin = freqs.sin() * attention_scaling
        sin = self.recomposition_frequencies(sin, layer_type)
        cos = self.recomposition_frequencies(cos, layer_type)
        return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)

    def recomposition_frequencies(self, freq, layer_type=None):
        freq_row, freq_column = freq[0][..., 0::2], freq[1][..., 1::2]
        return torch.stack([freq_row, freq_column], dim=-1).flatten(-2).repeat(1, 1, 2)


_ROWS = {  # and columns
    "expand(3,": "expand(2,",
    "sin = self.recomposition_frequencies(sin, layer_type)": "cos = self.recomposition_frequencies(cos)",
    "cos = self.recomposition_frequencies(cos, layer_type)": "sin = self.recomposition_frequencies(sin)",
    "dtype=x.dtype": "x.dtype",
}
_COMPASS = CohereCompassRotaryEmbedding
_NEO_MME = reworded("NeoMMERotaryEmbedding", _COMPASS, _ROWS)


class Qwen2VLVisionRotaryEmbedding(nn.Module):
    """A table of the rows and columns of patches, ``[T, 2]``, in float32."""

    def forward(self, x, position_ids):
        freqs = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float)
        cos = freqs.cos() * self.attention_scaling
        sin = freqs.sin() * self.attention_scaling
        cos = self.recomposition_frequencies(cos)
        sin = self.recomposition_frequencies(sin)
        return cos, sin

    def recomposition_frequencies(self, freq):
        freq_h, freq_w = freq[:, 0], freq[:, 1]
        freq_hw = torch.cat([freq_h, freq_w], dim=-1)
        return torch.cat([freq_hw, freq_hw], dim=-1)


_PATCHES = Qwen2VLVisionRotaryEmbedding
_CAST = {"cos, sin": "cos.to(x.dtype), sin.to(x.dtype)"}
_CAST_BY_NAME = {"cos, sin": "cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)"}
_PIXTRAL = reworded("PixtralVisionRotaryEmbedding", _PATCHES, _CAST)
_MUSE_SPARK = reworded("MuseSparkVisionRotaryEmbedding", _PATCHES, _CAST_BY_NAME)


def _refuse(table: Any) -> str | None:
    """Say of a table that does more than choose that it does: the kernel asks it of angles, in place of cos and sin."""
    try:
        chooses = _chooses(table)
    except Exception:  # it wants something else than what it is asked of here
        return "its recomposition_frequencies cannot be asked what it chooses"
    return None if chooses else "its recomposition_frequencies does more than choose"


def _refuse_patches(table: Any) -> str | None:
    return _UNTRAINED(table) or _refuse(table)


def _chooses(table: Any) -> bool:
    compose, rope_type = table.recomposition_frequencies, getattr(table, "rope_type", None)
    takes_type = len(inspect.signature(compose).parameters) > 1
    with _disable_current_modes(), torch.no_grad():  # with fake tensors there would be no values
        for layer_type, shape in product(rope_type if isinstance(rope_type, dict) else [None], _SHAPES):
            count = getattr(table, "inv_freq" if layer_type is None else f"{layer_type}_inv_freq").shape[-1]
            x = torch.arange(math.prod(shape) * count, dtype=torch.float32, device="cpu").view(*shape, count)
            chosen, others = (compose(given, *[layer_type] * takes_type) for given in (x.clone(), _other(x)))
            if not torch.equal(_other(chosen), others):
                return False
    return True


def _other(x: Tensor) -> Tensor:
    """Return others, in reverse order and without a zero: what sums, compares or fills in gives other ones of them."""
    return -x.square() - 1


# of what tables choose from: dimensions, rows and positions; patches and their two dimensions; and rows of patches
_SHAPES = (8, 2, 5), (5, 2), (5, 5, 2)
PATTERNS = (
    _table(_LLAMA, ("RotaryEmbedding",), _SINGLE),
    _table(reworded("OlmoRotaryEmbedding", _LLAMA, _IN_FLOAT32), ("RotaryEmbeddingFloat32",), _SINGLE),
    _table(reworded("CohereRotaryEmbedding", _LLAMA, _NEIGHBOURS), ("RotaryEmbeddingInterleaved",), _SINGLE),
    _table(reworded("GptOssRotaryEmbedding", _LLAMA, _ONCE), ("RotaryEmbeddingHalfWidth",), _SINGLE),
    Pattern(_TRAINED, ("RotaryEmbeddingTrained",), _single_type()),
    Pattern(_NOT_TRAINED, ("RotaryEmbeddingLearned",), _single_type()),
    _table(_GEMMA, ("RotaryEmbeddingByType",), _BY_TYPE),
    _table(reworded("Olmo3RotaryEmbedding", _GEMMA, _IN_FLOAT32), ("RotaryEmbeddingByTypeFloat32",), _BY_TYPE),
    _table(_DEEPSEEK_V4, ("RotaryEmbeddingHalfWidthByType",), _BY_TYPE),
    _table(reworded("EsmRotaryEmbedding", _GEMMA, _ANY_TYPE), ("RotaryEmbeddingOfAnyType",), _SINGLE),
    _table(_QWEN, ("RotaryEmbeddingComposed",), lambda module: _SINGLE(module) or _refuse(module)),
    _table(_ERNIE, ("RotaryEmbeddingComposedFloat32",), lambda module: _SINGLE(module) or _refuse(module)),
    _table(_HUNYUAN, ("RotaryEmbeddingComposedBySections",), lambda module: _SINGLE(module) or _refuse(module)),
    _table(_COMPASS, ("RotaryEmbeddingComposedByType",), lambda module: _BY_TYPE(module) or _refuse(module)),
    _table(_NEO_MME, ("RotaryEmbeddingOfRowsByType",), lambda module: _BY_TYPE(module) or _refuse(module)),
    _table(_PATCHES, ("RotaryEmbeddingOfPatchesFloat32",), _refuse_patches),
    _table(_PIXTRAL, ("RotaryEmbeddingOfPatches",), _refuse_patches),
    _table(_MUSE_SPARK, ("RotaryEmbeddingOfPatches",), _refuse_patches),
)
