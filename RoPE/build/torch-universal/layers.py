"""Layers whose forward `kernels` binds to the rotary functions of transformers, and to what makes their cos and sin.

Each takes the arguments of the function that it replaces, by the same names, and gives its dtypes.
"""

from .embedding import (
    RotaryEmbedding,
    RotaryEmbeddingByType,
    RotaryEmbeddingByTypeFloat32,
    RotaryEmbeddingComposed,
    RotaryEmbeddingComposedBySections,
    RotaryEmbeddingComposedByType,
    RotaryEmbeddingComposedFloat32,
    RotaryEmbeddingFloat32,
    RotaryEmbeddingHalfWidth,
    RotaryEmbeddingHalfWidthByType,
    RotaryEmbeddingInterleaved,
    RotaryEmbeddingLearned,
    RotaryEmbeddingOfAnyType,
    RotaryEmbeddingOfPatches,
    RotaryEmbeddingOfPatchesFloat32,
    RotaryEmbeddingOfRowsByType,
    RotaryEmbeddingTrained,
)
from .interleaved import (
    RotaryEmbComplex,
    RotaryEmbComplexBySequence,
    RotaryPosEmbDeinterleaved,
    RotaryPosEmbDeinterleavedOptionalKey,
    RotaryPosEmbEveryTwo,
    RotaryPosEmbInterleaved,
    RotaryPosEmbInterleavedFloat32,
    RotaryPosEmbInterleavedHalfWidth,
    RotaryPosEmbInterleavedPartial,
    RotaryPosEmbInterleavedRepeated,
    RotaryPosEmbInterleavedRepeatedFloat32,
    RotaryPosEmbInterleavedRepeatedPartial,
    RotaryPosEmbInterleavedTail,
    RotaryPosEmbPairwise,
    VisionRotaryEmbComplex,
    VisionRotaryPosEmbPairwise,
)
from .rotate_half import (
    MultimodalRotaryPosEmb,
    RotaryPosEmb,
    RotaryPosEmbCastBack,
    RotaryPosEmbFloat32,
    RotaryPosEmbHalfWidth,
    RotaryPosEmbLastQueries,
    RotaryPosEmbPartial,
    RotaryPosEmbPartialOptionalKey,
    RotaryPosEmbPartialPositions,
    RotaryPosEmbPatches,
    RotaryPosEmbReversed,
    RotaryPosEmbSingle,
    RotaryPosEmbTablesInFloat32,
    VisionRotaryPosEmb,
    VisionRotaryPosEmbPartial,
)
