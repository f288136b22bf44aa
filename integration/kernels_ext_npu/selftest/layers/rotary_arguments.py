"""Makes arguments for the rotary functions of transformers, and small rotary embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kernels_ext_npu.matching.lookup import find_pattern

LAYER_TYPES = ("full_attention", "sliding_attention")
TABLES = ("cos", "sin", "freqs_cis", "freqs_ci")
FIXED = (*TABLES, "mrope_section")  # what is not rotated
ONE_IMAGE = ("vision_apply_rotary_emb",)  # functions whose factors are of the positions of one image
B, N, K, S, D = 2, 4, 1, 6, 16  # K heads of keys: one is the hardest to lay out
# of a head that is turned, by the file of the function
PARTS = dict.fromkeys(
    (
        *("gpt_neox", "glmasr", "phi3", "nemotron", "qwen4_exp", "glm4", "glm4v", "gptj"),
        *("minimax_m3_vl", "gpt_oss", "openai_privacy_filter"),
    ),
    2,
) | {"deepseek_v4": 4}


def arguments(name: str, dtype: torch.dtype, table_dtype: torch.dtype, positions: int = S) -> dict[str, Any]:
    """Make arguments by the names of a function's parameters, for the one that has this name in known_forwards.json.

    cos and sin are random, each value on its own, and differ by row: a layer that takes the wrong ones is noticed.
    q and k are transposed views, as attention makes them.
    """
    generator = torch.Generator().manual_seed(0)
    file, _, function = name.partition(":")

    def heads(count: int, positions: int = positions) -> Tensor:
        return torch.randn(B, positions, count, D, generator=generator).to(dtype).transpose(1, 2)

    def tables(*shape: int) -> dict[str, Tensor]:
        return {name: torch.randn(shape, generator=generator).to(table_dtype) for name in ("cos", "sin")}

    width = D // PARTS.get(file, 1)
    if file in ("gemma4", "deepseek_v4"):
        return {"x": heads(N)} | tables(B, positions, width)
    if file in ("deepseek_v2", "llama4"):
        turned = [heads(count) if file == "deepseek_v2" else heads(count).transpose(1, 2) for count in (N, K)]
        leading = (positions, 1) if function in ONE_IMAGE else (B, positions)
        factors = torch.randn(*leading, D // 2, dtype=torch.complex64, generator=generator)
        names = ("query", "key", "freqs_ci") if function in ONE_IMAGE else ("xq", "xk", "freqs_cis")
        return dict(zip(names, (*turned, factors)))
    if file == "gptj":
        return {"tensor": heads(N).transpose(1, 2)} | tables(B, positions, width)
    if function == "apply_rotary_pos_emb_vision":
        q, k = heads(N).transpose(1, 2), heads(N).transpose(1, 2)
        return ({"q": q, "k": k} if file == "minimax_m3_vl" else {"q": q[0], "k": k[0]}) | tables(positions, width)
    if file in ("dinov3_vit", "sam3"):
        count = positions + 2 * (file == "dinov3_vit")
        return {"q": heads(N, count), "k": heads(N, count)} | tables(positions, width)
    made = {"q": heads(N, 1 if file == "muse_glimmer_assistant" else positions), "k": heads(K)}
    if function == "apply_multimodal_rotary_pos_emb":
        return made | tables(3, B, positions, width) | {"mrope_section": [2, 3, 3]}
    return made | tables(B, positions, width)


def embedding(cls: type[nn.Module], by_type: bool, rope_type: str = "default", scaling: float = 1.0) -> nn.Module:
    """Make a rotary embedding of twelve frequencies: what its forward reads, without the config of its architecture."""
    module: Any = cls.__new__(cls)
    nn.Module.__init__(module)
    frequencies = 1e4 ** -(torch.arange(12) / 12)
    reference = find_pattern(cls)
    assert reference is not None
    section = (3, 3, 3, 3) if reference.layers == ("RotaryEmbeddingComposedBySections",) else (4, 4, 4)
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
