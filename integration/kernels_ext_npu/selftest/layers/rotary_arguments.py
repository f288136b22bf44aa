"""Makes arguments for the rotary functions of transformers, and small rotary embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kernels_ext_npu.matching.lookup import find_pattern

LAYER_TYPES = ("full_attention", "sliding_attention")
TABLES = ("cos", "sin", "freqs_cis", "freqs_ci")
FIXED = (*TABLES, "mrope_section")  # what is not rotated
B, N, K, S, D = 2, 4, 1, 6, 16  # K heads of keys: one is the hardest to lay out
_HALF = ("gpt_neox", "glmasr", "phi3", "nemotron", "qwen4_exp", "glm4", "glm4v", "gptj")
_TOWERS = ("minimax_m3_vl_vision", "minimax_m3_vl_tower")
# of a head that is turned
PARTS = dict.fromkeys((*_HALF, *_TOWERS, "gpt_oss", "openai_privacy_filter"), 2) | {"deepseek_v4": 4}


def arguments(reference: str, dtype: torch.dtype, table_dtype: torch.dtype, positions: int = S) -> dict[str, Any]:
    """Make arguments by the names of a reference's parameters, for the function whose reference has that name.

    cos and sin are random, each value on its own, and differ by row: a layer that takes the wrong ones is noticed.
    q and k are transposed views, as attention makes them.
    """
    generator = torch.Generator().manual_seed(0)

    def heads(count: int, positions: int = positions) -> Tensor:
        return torch.randn(B, positions, count, D, generator=generator).to(dtype).transpose(1, 2)

    def tables(*shape: int) -> dict[str, Tensor]:
        return {name: torch.randn(shape, generator=generator).to(table_dtype) for name in ("cos", "sin")}

    width = D // PARTS.get(reference, 1)
    if reference in ("gemma4", "deepseek_v4"):
        return {"x": heads(N)} | tables(B, positions, width)
    if reference in ("deepseek_v2", "llama4", "llama4_vision"):
        turned = [heads(count) if reference == "deepseek_v2" else heads(count).transpose(1, 2) for count in (N, K)]
        leading = (positions, 1) if reference == "llama4_vision" else (B, positions)
        factors = torch.randn(*leading, D // 2, dtype=torch.complex64, generator=generator)
        names = ("query", "key", "freqs_ci") if reference == "llama4_vision" else ("xq", "xk", "freqs_cis")
        return dict(zip(names, (*turned, factors)))
    if reference == "gptj":
        return {"tensor": heads(N).transpose(1, 2)} | tables(B, positions, width)
    if reference in (*_TOWERS, "qwen2_vl_vision", "inkling2_vision"):
        q, k = heads(N).transpose(1, 2), heads(N).transpose(1, 2)
        return ({"q": q, "k": k} if reference == _TOWERS[0] else {"q": q[0], "k": k[0]}) | tables(positions, width)
    if reference in ("dinov3_vit", "sam3"):
        count = positions + 2 * (reference == "dinov3_vit")
        return {"q": heads(N, count), "k": heads(N, count)} | tables(positions, width)
    made = {"q": heads(N, 1 if reference == "muse_glimmer_assistant" else positions), "k": heads(K)}
    if reference == "qwen2_vl_multimodal":
        return made | tables(3, B, positions, width) | {"mrope_section": [2, 3, 3]}
    return made | tables(B, positions, width)


def embedding(cls: type[nn.Module], by_type: bool, rope_type: str = "default", scaling: float = 1.0) -> nn.Module:
    """Make a rotary embedding of twelve frequencies: what its forward reads, without the config of its architecture."""
    module: Any = cls.__new__(cls)
    nn.Module.__init__(module)
    frequencies = 1e4 ** -(torch.arange(12) / 12)
    reference = find_pattern(cls)
    assert reference is not None
    section = getattr(reference.original, "mrope_section", (4, 4, 4))
    module.mrope_section = dict.fromkeys(LAYER_TYPES, section) if by_type else section
    if reference.layers in (("RotaryEmbeddingLearned",), ("RotaryEmbeddingTrained",)):
        module.register_buffer("alpha", torch.linspace(-1, 1, 12))
    if not by_type:
        module.register_buffer("inv_freq", frequencies, persistent=False)
        module.rope_type, module.attention_scaling = rope_type, scaling
        return module
    module.rope_type = dict.fromkeys(LAYER_TYPES, rope_type)
    for number, name in enumerate(LAYER_TYPES):
        module.register_buffer(f"{name}_inv_freq", frequencies / (1 + number), persistent=False)
        setattr(module, f"{name}_attention_scaling", scaling)
    return module
