"""Which kernel repositories there are: one entry each. Whatever else depends on it is derived from here.

The patterns (patterns/) say what a layer computes; they are not needed before a model is there.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A kind of class, module or function that layers of a repository serve."""

    name: str  # what the classes and functions of transformers are counted as
    layers: tuple[str, ...]  # that serve it, each with an entry in transformers' mapping; none where called by name
    in_models: str  # what the modules and calls of a model are counted as


@dataclass(frozen=True)
class Repository:
    """A kernel repository."""

    name: str  # of its folder, and of the repository on the Hub
    kernel: str  # its name in build.toml and ``metadata.json``
    kinds: tuple[Kind, ...]  # what it serves


def _kind(name: str, layers: str = "", in_models: str = "") -> Kind:
    return Kind(name, tuple(layers.split()), in_models or name)


NORMS = _kind(
    "norms",
    """
    MambaRMSNormGated RMSNorm RMSNormCastLast RMSNormGated RMSNormGatedCastLast RMSNormWeightless RMSNormZeroCentered
    T5LayerNorm
    """,
)
LAYER_NORMS = _kind("layer norms", "AddLayerNorm LayerNorm LayerNormFloat32")
HYPER_CONNECTIONS = _kind("hyper-connections", "HyperConnection HyperHead IndependentHyperConnection")
MLPS = _kind(
    "gated MLPs",
    """
    ClampedSwiGLUMLP DropoutMLP DroppedMLP ExactGeGLUMLP FusedAdaptedMLP FusedDropoutMLP FusedExactGeGLUMLP
    FusedGeGLUMLP FusedMLPByLayer FusedSwiGLUMLP GeGLUMLP GloballyScaledMLP NormedMLP ScaledSwiGLUMLP SwiGLUMLP
    """,
)
ROTARY = _kind(
    "rotary functions",
    """
    MultimodalRotaryPosEmb RotaryEmbComplex RotaryEmbComplexBySequence RotaryPosEmb RotaryPosEmbCastBack
    RotaryPosEmbDeinterleaved RotaryPosEmbDeinterleavedOptionalKey RotaryPosEmbEveryTwo RotaryPosEmbFloat32
    RotaryPosEmbHalfWidth RotaryPosEmbInterleaved RotaryPosEmbInterleavedFloat32 RotaryPosEmbInterleavedHalfWidth
    RotaryPosEmbInterleavedPartial RotaryPosEmbInterleavedRepeated RotaryPosEmbInterleavedRepeatedFloat32
    RotaryPosEmbInterleavedRepeatedPartial RotaryPosEmbInterleavedTail RotaryPosEmbLastQueries RotaryPosEmbPairwise
    RotaryPosEmbPartial RotaryPosEmbPartialOptionalKey RotaryPosEmbPartialPositions RotaryPosEmbPatches
    RotaryPosEmbReversed RotaryPosEmbSingle RotaryPosEmbTablesInFloat32 VisionRotaryEmbComplex VisionRotaryPosEmb
    VisionRotaryPosEmbPairwise VisionRotaryPosEmbPartial
    """,
    in_models="rotary calls",
)
TABLES = _kind(
    "rotary tables",
    """
    RotaryEmbedding RotaryEmbeddingByType RotaryEmbeddingByTypeFloat32 RotaryEmbeddingComposed
    RotaryEmbeddingComposedBySections RotaryEmbeddingComposedByType RotaryEmbeddingComposedFloat32
    RotaryEmbeddingFloat32 RotaryEmbeddingHalfWidth RotaryEmbeddingHalfWidthByType RotaryEmbeddingInterleaved
    RotaryEmbeddingLearned RotaryEmbeddingOfAnyType RotaryEmbeddingOfPatches RotaryEmbeddingOfPatchesFloat32
    RotaryEmbeddingOfRowsByType RotaryEmbeddingTrained
    """,
)
EXPERTS = _kind("experts", "ClampedExperts FlatExperts GatedMoEBlock MoEExperts ScaledTokensMoEBlock SparseMoEBlock")
ROUTERS = _kind(
    "routers",
    """
    BiasedSoftmaxTopKRouter CorrectedSoftmaxTopKRouter GroupedSoftmaxTopKRouter GroupedSoftmaxTopKRouterNarrow
    GroupedSoftmaxTopKRouterNormalised SigmoidScatterRouter SigmoidTopKRouter SigmoidTopKRouterGivenBias
    SigmoidTopKRouterLinear SigmoidTopKRouterMultiplied SigmoidTopKRouterNarrow SigmoidTopKRouterNarrowGivenBias
    SigmoidTopKRouterNormalised SigmoidTopKRouterSoftcapped SigmoidTopKRouterUnbiased SigmoidTopKRouterUngrouped
    SoftmaxTopKRouter SoftmaxTopKRouterFloat32 SoftmaxTopKRouterInFloat32 SoftmaxTopKRouterLinear
    SoftmaxTopKRouterUnnormalised TopKRouter TopKSoftmaxRouter
    """,
)
ACTIVATIONS = _kind("activations", "FastGELU NewGELU QuickGELU")
PATCHES = _kind("patch embeddings", "PatchEmbedding")
LINEAR_ATTENTION = _kind(
    "linear attention functions",
    """
    CausalConv1d CausalConv1dBeforeScan CausalConv1dUpdate ChunkGatedDeltaRule ChunkKDA FusedRecurrentGatedDeltaRule
    FusedRecurrentKDA SelectiveScan
    """,
    in_models="linear attention calls",
)
RECURRENCES = _kind("gated recurrences", "RGLRU")
FORGET_GATES = _kind("forget gates", "ForgetGate")
ATTENTION = _kind("attention")
IMPLEMENTATION = "npu_flash_attention"  # of attention, by the name of which models call it
INDEXERS = _kind("indexers")  # which choose the keys that attention is about
COMPRESSORS = _kind("compressors")  # of several keys into one
HEADS = _kind("heads")  # no layer: what a head returns computes the loss
PROJECTIONS = _kind("projections")  # no layer: torch's own class is found by what it is

CATALOGUE = (
    Repository("RMSNorm", "rmsnorm", (NORMS, LAYER_NORMS, HYPER_CONNECTIONS)),
    Repository("SwiGLU", "swiglu", (MLPS,)),
    Repository("RoPE", "rope", (ROTARY, TABLES)),
    Repository("FusedMoE", "fused-moe", (EXPERTS, ROUTERS)),
    Repository("FlashAttention", "flash-attention", (ATTENTION, INDEXERS, COMPRESSORS)),
    Repository("Activation", "activation", (ACTIVATIONS,)),
    Repository("CrossEntropy", "cross-entropy", ()),
    Repository("Linear", "linear", (PATCHES,)),
    Repository("LinearAttention", "linear-attention", (LINEAR_ATTENTION, RECURRENCES, FORGET_GATES)),
)

FUNCTIONS = (ROTARY, LINEAR_ATTENTION)  # served by functions, not by modules

SERVING = tuple(repository for repository in CATALOGUE if repository.kinds)
REPOSITORIES = tuple(sorted(repository.name for repository in CATALOGUE))
KERNELS = frozenset(repository.kernel for repository in CATALOGUE)
KINDS = tuple(kind for repository in CATALOGUE for kind in repository.kinds)
KIND_OF_LAYER = {layer: kind for kind in KINDS for layer in kind.layers}
LAYERS = {layer: repo.name for repo in CATALOGUE for kind in repo.kinds for layer in kind.layers}

_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


def in_words() -> str:
    """Return how many repositories there are, for a sentence."""
    return _WORDS[len(REPOSITORIES)] if len(REPOSITORIES) < len(_WORDS) else str(len(REPOSITORIES))
