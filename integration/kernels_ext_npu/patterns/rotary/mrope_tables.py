"""The modules of transformers that make cos and sin of positions of several dimensions, in images and beside them.

They compute cos and sin of every position, and choose from both what belongs to a frequency.
"""

from functools import partial

import torch
from torch import nn
from transformers.modeling_rope_utils import dynamic_rope_update

from kernels_ext_npu.patterns.pattern import Pattern
from kernels_ext_npu.patterns.rotary.rope_tables import BY_TYPE, IN_FLOAT32, SINGLE
from kernels_ext_npu.patterns.variant import variant


class Qwen2_5_VLRotaryEmbedding(nn.Module):
    """A table of positions ``[3, B, S]``: sections of the frequencies go by time, height and width."""

    mrope_section: tuple[int, ...] = (2, 5, 5)

    @torch.no_grad()
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


_QWEN = Qwen2_5_VLRotaryEmbedding.forward
_recomposed = partial(variant, of=Qwen2_5_VLRotaryEmbedding, method="recomposition_frequencies")
_NEIGHBOURS = {"torch.cat((freq, freq), dim=-1)": "freq.repeat_interleave(2, dim=-1)"}  # the two columns of an angle
Glm4vTextRotaryEmbedding = _recomposed("Glm4vTextRotaryEmbedding", changes=_NEIGHBOURS)
Glm4vMoeRotaryEmbedding = _recomposed("Glm4vMoeTextRotaryEmbedding", changes={"(freq, freq)": "[freq, freq]"})


class Qwen3VLTextRotaryEmbedding(Qwen2_5_VLRotaryEmbedding):
    """A table in which frequencies go by time, height and width in turn."""

    mrope_section = (4, 4, 4)

    def recomposition_frequencies(self, freq):
        freqs_thw = freq[0]
        for dim, offset in enumerate((1, 2), start=1):
            length = self.mrope_section[dim] * 3
            idx = slice(offset, length, 3)
            freqs_thw[..., idx] = freq[dim, ..., idx]
        return torch.cat((freqs_thw, freqs_thw), dim=-1)


class Ernie4_5_VLMoeTextRotaryEmbedding(Qwen2_5_VLRotaryEmbedding):
    """A table in float32 in which frequencies go by height and width in turn, and the last ones by time."""

    mrope_section = (4, 4, 4)
    forward = variant("in_float32", _QWEN, IN_FLOAT32)

    def recomposition_frequencies(self, freq):
        freq_h, freq_w, freq_t = (m[(i + 1) % 3] for i, m in enumerate(freq.split([*self.mrope_section], dim=-1)))
        freq_hw = torch.stack([freq_h, freq_w], dim=-1).flatten(-2)
        freq_hwt = torch.cat([freq_hw, freq_t], dim=-1)
        return freq_hwt.repeat_interleave(2, dim=-1)


class HunYuanVLRotaryEmbedding(Qwen2_5_VLRotaryEmbedding):
    """A table of as many dimensions as there are sections."""

    mrope_section = (3, 3, 3, 3)
    forward = variant(
        "by_sections", _QWEN, {"expand(3,": "expand(len(self.mrope_section),", "dtype=x.dtype": "x.dtype"}
    )

    def recomposition_frequencies(self, freq):
        freq = torch.cat((freq, freq), dim=-1)
        split_sizes = [section * 2 for section in self.mrope_section]
        freq = torch.cat(
            [m[i % len(self.mrope_section)] for i, m in enumerate(freq.split(split_sizes, dim=-1))], dim=-1
        )
        return freq


class CohereCompassRotaryEmbedding(nn.Module):
    """A table for each type of layer, which has sections of its own too."""

    mrope_section = (4, 4, 4)

    @torch.no_grad()
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

    def recomposition_frequencies(self, freq, layer_type):
        mrope_section = self.mrope_section[layer_type]
        freqs_thw = freq[0]
        for dim, offset in enumerate((1, 2), start=1):
            length = mrope_section[dim] * 3
            idx = slice(offset, length, 3)
            freqs_thw[..., idx] = freq[dim, ..., idx]
        return torch.cat((freqs_thw, freqs_thw), dim=-1)


_OF_ROWS = {
    "expand(3,": "expand(2,",
    "sin = self.recomposition_frequencies(sin, layer_type)": "cos = self.recomposition_frequencies(cos)",
    "cos = self.recomposition_frequencies(cos, layer_type)": "sin = self.recomposition_frequencies(sin)",
    "dtype=x.dtype": "x.dtype",
}


class NeoMMERotaryEmbedding(CohereCompassRotaryEmbedding):
    """A table of rows and columns for each type of layer, whose frequencies go by them in turn."""

    forward = variant("of_rows", CohereCompassRotaryEmbedding.forward, _OF_ROWS)

    def recomposition_frequencies(self, freq):
        freq_row, freq_col = freq[0][..., 0::2], freq[1][..., 1::2]
        angles = torch.stack([freq_row, freq_col], dim=-1).flatten(-2)
        return torch.cat([angles, angles], dim=-1)


class Qwen2VLVisionRotaryEmbedding(nn.Module):
    """A table of the rows and columns of patches, ``[T, 2]``, in float32."""

    @torch.no_grad()
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


class Sam2VideoVisionRotaryEmbedding(Qwen2VLVisionRotaryEmbedding):
    """A table in which an angle's two columns are neighbours."""

    def recomposition_frequencies(self, freq):
        freq_h, freq_w = freq[:, 0], freq[:, 1]
        freq_hw = torch.cat([freq_h, freq_w], dim=-1)[None, ...]
        return freq_hw.repeat_interleave(2, dim=-1)


class Kimi_K25VisionRotaryEmbedding(Qwen2VLVisionRotaryEmbedding):
    """A table in which columns and rows take turns."""

    def recomposition_frequencies(self, freq):
        freq_wh = freq.transpose(1, 2).flip(-1).flatten(1)
        return torch.cat([freq_wh, freq_wh], dim=-1)


class Step3p7VisionRotaryEmbedding(Qwen2VLVisionRotaryEmbedding):
    def recomposition_frequencies(self, freq):
        freq_hw = freq.flatten(1)
        return torch.cat((freq_hw, freq_hw), dim=-1)


# columns before rows, since transformers 5.23
Step3p7VisionTowerRotaryEmbedding = variant(
    "Step3p7VisionTowerRotaryEmbedding",
    Step3p7VisionRotaryEmbedding,
    {"freq.flatten": "freq.flip(1).flatten"},
    "recomposition_frequencies",
)


_IN_DTYPE_OF_X = {"cos, sin": "cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)"}
MuseSparkVisionRotaryEmbedding = variant("MuseSparkVisionRotaryEmbedding", Qwen2VLVisionRotaryEmbedding, _IN_DTYPE_OF_X)


class PixtralVisionRotaryEmbedding(Qwen2VLVisionRotaryEmbedding):
    """A table in the dtype of x, for half of whose frequencies rows count, for the others columns."""

    forward = variant("cast", Qwen2VLVisionRotaryEmbedding.forward, {"cos, sin": "cos.to(x.dtype), sin.to(x.dtype)"})

    def recomposition_frequencies(self, freq):
        freq_h, freq_w = (m[:, i % 2] for i, m in enumerate(freq.chunk(2, dim=-1)))
        freq_hw = torch.cat([freq_h, freq_w], dim=-1)
        return torch.cat([freq_hw, freq_hw], dim=-1)


class MiniMaxM3VLVisionRotaryEmbedding(PixtralVisionRotaryEmbedding):
    """A table of positions with any number of dimensions."""

    def recomposition_frequencies(self, freq):
        freq = freq.flatten(1)
        return torch.cat([freq, freq], dim=-1)


class Gemma4VisionRotaryEmbedding(PixtralVisionRotaryEmbedding):
    """A table of positions ``[B, T, 2]``."""

    def recomposition_frequencies(self, freq):
        freq_h, freq_w = freq[:, :, 0], freq[:, :, 1]
        return torch.cat([freq_h, freq_h, freq_w, freq_w], dim=-1)


PATTERNS = (
    Pattern(Qwen2_5_VLRotaryEmbedding, ("RotaryEmbeddingComposed",), SINGLE),
    Pattern(Qwen3VLTextRotaryEmbedding, ("RotaryEmbeddingComposed",), SINGLE),
    Pattern(Glm4vTextRotaryEmbedding, ("RotaryEmbeddingComposed",), SINGLE),
    Pattern(Glm4vMoeRotaryEmbedding, ("RotaryEmbeddingComposed",), SINGLE),
    Pattern(Ernie4_5_VLMoeTextRotaryEmbedding, ("RotaryEmbeddingComposedFloat32",), SINGLE),
    Pattern(HunYuanVLRotaryEmbedding, ("RotaryEmbeddingComposedBySections",), SINGLE),
    Pattern(CohereCompassRotaryEmbedding, ("RotaryEmbeddingComposedByType",), BY_TYPE),
    Pattern(NeoMMERotaryEmbedding, ("RotaryEmbeddingOfRowsByType",), BY_TYPE),
    Pattern(Qwen2VLVisionRotaryEmbedding, ("RotaryEmbeddingOfPatchesFloat32",)),
    Pattern(Sam2VideoVisionRotaryEmbedding, ("RotaryEmbeddingOfPatchesFloat32",)),
    Pattern(Kimi_K25VisionRotaryEmbedding, ("RotaryEmbeddingOfPatchesFloat32",)),
    Pattern(Step3p7VisionRotaryEmbedding, ("RotaryEmbeddingOfPatchesFloat32",)),
    Pattern(Step3p7VisionTowerRotaryEmbedding, ("RotaryEmbeddingOfPatchesFloat32",)),
    Pattern(MuseSparkVisionRotaryEmbedding, ("RotaryEmbeddingOfPatches",)),
    Pattern(PixtralVisionRotaryEmbedding, ("RotaryEmbeddingOfPatches",)),
    Pattern(MiniMaxM3VLVisionRotaryEmbedding, ("RotaryEmbeddingOfPatches",)),
    Pattern(Gemma4VisionRotaryEmbedding, ("RotaryEmbeddingOfPatches",)),
)
