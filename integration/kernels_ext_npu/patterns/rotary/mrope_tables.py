"""The modules of transformers that make cos and sin of positions of several dimensions, in images and beside them.

They compute cos and sin of every position, and choose from both what belongs to a frequency. How is a method of each,
``recomposition_frequencies``, which the kernel asks, too: no pattern has to know it.
"""

import inspect
import math
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers.modeling_rope_utils import dynamic_rope_update

from kernels_ext_npu.patterns.reworded import reworded
from kernels_ext_npu.patterns.rotary.rope_tables import BY_TYPE, IN_FLOAT32, SINGLE, UNTRAINED, table


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
_ERNIE = reworded("Ernie4_5_VLMoeTextRotaryEmbedding", _QWEN, IN_FLOAT32)
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
    return UNTRAINED(table) or _refuse(table)


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
    table(_QWEN, ("RotaryEmbeddingComposed",), lambda module: SINGLE(module) or _refuse(module)),
    table(_ERNIE, ("RotaryEmbeddingComposedFloat32",), lambda module: SINGLE(module) or _refuse(module)),
    table(_HUNYUAN, ("RotaryEmbeddingComposedBySections",), lambda module: SINGLE(module) or _refuse(module)),
    table(_COMPASS, ("RotaryEmbeddingComposedByType",), lambda module: BY_TYPE(module) or _refuse(module)),
    table(_NEO_MME, ("RotaryEmbeddingOfRowsByType",), lambda module: BY_TYPE(module) or _refuse(module)),
    table(_PATCHES, ("RotaryEmbeddingOfPatchesFloat32",), _refuse_patches),
    table(_PIXTRAL, ("RotaryEmbeddingOfPatches",), _refuse_patches),
    table(_MUSE_SPARK, ("RotaryEmbeddingOfPatches",), _refuse_patches),
)
