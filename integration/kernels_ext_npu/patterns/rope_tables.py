"""The modules of transformers that make cos and sin of positions for the rotary functions.

Those of positions of several dimensions, in images and beside them, compute cos and sin of every position, and choose
from both what belongs to a frequency. How is a method of each, ``recomposition_frequencies``, which the kernel asks,
too: no fingerprint has to know it.
"""

import inspect
import math
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from kernels_ext_npu.patterns.pattern import Limits, Pattern, require


def _refuse(table: Any) -> str | None:
    """Say of a table that does more than choose that it does: the kernel asks it of angles, in place of cos and sin."""
    if not hasattr(table, "recomposition_frequencies"):
        return None
    try:
        chooses = _chooses(table)
    except Exception:  # it wants something else than what it is asked of here
        return "its recomposition_frequencies cannot be asked what it chooses"
    return None if chooses else "its recomposition_frequencies does more than choose"


# up to transformers 5.23 tables are under torch.no_grad, which makes no difference where nothing in them is trained
_UNTRAINED = require(
    lambda table: not any(parameter.requires_grad for parameter in table.parameters()),
    "it has trained parameters, and the kernel gives them no gradient",
    _refuse,
)


def _single_type(then: Limits = lambda _: None) -> Limits:
    """Return the limits of a table with one rope type, and others behind them."""
    return require(
        lambda table: isinstance(table.rope_type, str), "its rope type is {0.rope_type!r}, not one name", then
    )


_SINGLE = _single_type(_UNTRAINED)
_BY_TYPE = require(
    lambda table: isinstance(table.rope_type, dict),
    "its rope type is {0.rope_type!r}, not one for each type of layer",
    _UNTRAINED,
)


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
_LEARNED = "mistral_large4:MistralLarge4TextRotaryEmbedding"
PATTERNS = (
    Pattern("llama:LlamaRotaryEmbedding", ("RotaryEmbedding",), _SINGLE),
    Pattern("olmo:OlmoRotaryEmbedding", ("RotaryEmbeddingFloat32",), _SINGLE),
    Pattern("cohere:CohereRotaryEmbedding", ("RotaryEmbeddingInterleaved",), _SINGLE),
    Pattern("gpt_oss:GptOssRotaryEmbedding", ("RotaryEmbeddingHalfWidth",), _SINGLE),
    # frequencies are multiplied by a factor that was learned, of which alpha is the logarithm
    Pattern(f"{_LEARNED}@5.24", ("RotaryEmbeddingTrained",), _single_type()),
    Pattern(f"{_LEARNED}@5.22", ("RotaryEmbeddingLearned",), _single_type()),
    Pattern("gemma3:Gemma3RotaryEmbedding", ("RotaryEmbeddingByType",), _BY_TYPE),
    Pattern("olmo3:Olmo3RotaryEmbedding", ("RotaryEmbeddingByTypeFloat32",), _BY_TYPE),
    Pattern("deepseek_v4:DeepseekV4RotaryEmbedding", ("RotaryEmbeddingHalfWidthByType",), _BY_TYPE),
    # takes a type of layer, and does not use it
    Pattern("esm:EsmRotaryEmbedding", ("RotaryEmbeddingOfAnyType",), _SINGLE),
    Pattern("qwen2_5_vl:Qwen2_5_VLRotaryEmbedding", ("RotaryEmbeddingComposed",), _SINGLE),
    Pattern("ernie4_5_vl_moe:Ernie4_5_VLMoeTextRotaryEmbedding", ("RotaryEmbeddingComposedFloat32",), _SINGLE),
    Pattern("hunyuan_vl:HunYuanVLRotaryEmbedding", ("RotaryEmbeddingComposedBySections",), _SINGLE),
    Pattern("cohere_compass:CohereCompassRotaryEmbedding", ("RotaryEmbeddingComposedByType",), _BY_TYPE),
    Pattern("neomme:NeoMMERotaryEmbedding", ("RotaryEmbeddingOfRowsByType",), _BY_TYPE),
    Pattern("qwen2_vl:Qwen2VLVisionRotaryEmbedding", ("RotaryEmbeddingOfPatchesFloat32",), _UNTRAINED),
    Pattern("pixtral:PixtralVisionRotaryEmbedding", ("RotaryEmbeddingOfPatches",), _UNTRAINED),
    Pattern("muse_spark:MuseSparkVisionRotaryEmbedding", ("RotaryEmbeddingOfPatches",), _UNTRAINED),
)
