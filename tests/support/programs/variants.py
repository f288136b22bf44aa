"""The models that programs start with: one or two layers of each way in which kernels serve a model."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_hidden_layers": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# prefix of the classes, and what their config has beyond SIZES
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Qwen3", {}),
    "dense with biases": ("Llama", {"mlp_bias": True, "attention_bias": True}),
    "tied embeddings": ("Llama", {"num_hidden_layers": 1, "tie_word_embeddings": True}),
    "gate and up in one projection": ("Phi3", {"num_hidden_layers": 1}),
    "GeGLU, norms around one": ("Gemma", {"num_hidden_layers": 1}),
    "experts": ("Qwen3Moe", EXPERTS | {"num_experts": 4}),
    "experts with clipped SwiGLU": ("GptOss", EXPERTS | {"num_local_experts": 4, "intermediate_size": 32}),
    "partial rotation": ("GPTNeoX", {"num_hidden_layers": 1, "rotary_pct": 0.5}),
    "interleaved rotation": ("Glm", {"num_hidden_layers": 1, "partial_rotary_factor": 0.5}),
}
IDS = torch.randint(2, 60, (2, 5), generator=torch.Generator().manual_seed(0))


def make(variant: str) -> PreTrainedModel:
    """Return a new model of a variant on the CPU, always the same one, in evaluation mode."""
    return copy.deepcopy(_made(variant))


def inputs(device: torch.device | str) -> dict[str, Tensor]:
    """Return the arguments of a forward: ids ``[2, 5]``, and labels so that there is a loss."""
    ids = IDS.to(device)
    return {"input_ids": ids, "labels": ids, "use_cache": False}  # type: ignore[dict-item]


@cache
def _made(variant: str) -> PreTrainedModel:
    """Build a model whose weights are all of some size: initial ones and zeros would hide what is left out."""
    prefix, options = VARIANTS[variant]
    config = getattr(transformers, f"{prefix}Config")(**SIZES | options)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + drawn / 4 if "norm" in name and name.endswith("weight") else drawn / 6)
    return model
