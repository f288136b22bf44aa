"""The tiny random models of the demo, and what it feeds to a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

Inputs = dict[str, torch.Tensor]

_PROMPT = 12
_TEXT = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DEEPSEEK = {
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
_IMAGE, _VISION_START, _VISION_END = 99, 96, 95
_VISION_LANGUAGE = {
    # time, height and width share the eight frequencies of a head
    "text_config": _TEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
    "vision_config": {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 4,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    },
    "image_token_id": _IMAGE,
    "vision_start_token_id": _VISION_START,
    "vision_end_token_id": _VISION_END,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3": ("qwen3", _TEXT),
    "Llama": ("llama", _TEXT),
    "Gemma 3": ("gemma3_text", _TEXT),
    "Olmo 3": ("olmo3", _TEXT),
    "Phi-3": ("phi3", _TEXT),
    "GLM-4": ("glm4", _TEXT),
    "Qwen2.5-VL": ("qwen2_5_vl", _VISION_LANGUAGE),
    "gpt-oss": ("gpt_oss", _TEXT | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen3-MoE": ("qwen3_moe", _TEXT | _EXPERTS | {"num_experts": 8, "norm_topk_prob": True}),
    "DeepSeek-V3": ("deepseek_v3", _TEXT | _EXPERTS | _DEEPSEEK),
}

IN_GRAPHS = {"Qwen3", "gpt-oss"}  # that generate a second time, with one launch for the forward of a token


def loader(config: Any) -> Any:
    """Return the auto class that loads a checkpoint and can generate; None for a model that generates no text."""
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            return auto
    return None


def save(name: str, folder: Path) -> None:
    """Save a tiny random model whose norms and biases are its own.

    Ones and zeros would hide a kernel that ignores them.
    """
    torch.manual_seed(0)
    model_type, sizes = MODELS[name]
    config = AutoConfig.for_model(model_type, **sizes)
    model = loader(config).from_config(config)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "norm" in path or path.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def inputs(config: Any) -> Inputs:
    """Make a prompt of two rows; in the demo's own vision-language model it has an image in each of them."""
    text = config.get_text_config()
    ids = torch.randint(2, min(text.vocab_size, 90), (2, _PROMPT))
    vision = getattr(config, "vision_config", None)
    if vision is None or config.image_token_id != _IMAGE or vision.hidden_size != 32:
        return {"input_ids": ids}
    grid = torch.tensor([[1, 4, 4]] * 2)
    patches = torch.randn(2 * 16, 3 * vision.temporal_patch_size * vision.patch_size**2)
    ids[:, 3:7] = _IMAGE  # four patches make a token
    kinds = (ids == _IMAGE).long()
    return {"input_ids": ids, "mm_token_type_ids": kinds, "pixel_values": patches, "image_grid_thw": grid}


def on(device: str, made: Inputs) -> Inputs:
    """Return the inputs on a device."""
    return {name: value.to(device) for name, value in made.items()}
