"""Sizes of models as their publishers wrote them down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Published:
    """What a model's config.json says of its sizes, and where it says so."""

    model_type: str
    source: str
    sizes: dict[str, Any]


def _published(repository: str, model_type: str, **sizes: Any) -> Published:
    return Published(model_type, f"https://huggingface.co/{repository}/blob/main/config.json", sizes)


MODELS = {
    "Qwen3-8B": _published(
        "Qwen/Qwen3-8B",
        "qwen3",
        num_hidden_layers=36,
        vocab_size=151936,
        tie_word_embeddings=False,
        hidden_size=4096,
        intermediate_size=12288,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "Qwen3-0.6B": _published(
        "Qwen/Qwen3-0.6B",
        "qwen3",
        num_hidden_layers=28,
        vocab_size=151936,
        tie_word_embeddings=True,
        hidden_size=1024,
        intermediate_size=3072,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "Llama-3.1-8B": _published(
        "meta-llama/Llama-3.1-8B",
        "llama",
        num_hidden_layers=32,
        vocab_size=128256,
        tie_word_embeddings=False,
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "Gemma-3-12B": _published(
        "google/gemma-3-12b-pt",
        "gemma3_text",
        num_hidden_layers=48,
        vocab_size=262208,
        hidden_size=3840,
        intermediate_size=15360,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=1024,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        },
    ),
    "Gemma-3-1B": _published(
        "google/gemma-3-1b-pt",
        "gemma3_text",
        num_hidden_layers=26,
        vocab_size=262144,
        hidden_size=1152,
        intermediate_size=6912,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=512,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "Qwen3-30B-A3B": _published(
        "Qwen/Qwen3-30B-A3B",
        "qwen3_moe",
        num_hidden_layers=48,
        vocab_size=151936,
        tie_word_embeddings=False,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "Qwen3-235B-A22B": _published(
        "Qwen/Qwen3-235B-A22B",
        "qwen3_moe",
        num_hidden_layers=94,
        vocab_size=151936,
        tie_word_embeddings=False,
        hidden_size=4096,
        intermediate_size=12288,
        moe_intermediate_size=1536,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "gpt-oss-20b": _published(
        "openai/gpt-oss-20b",
        "gpt_oss",
        num_hidden_layers=24,
        vocab_size=201088,
        tie_word_embeddings=False,
        hidden_size=2880,
        intermediate_size=2880,
        num_local_experts=32,
        num_experts_per_tok=4,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        sliding_window=128,
    ),
    "Qwen3-Next-80B-A3B": _published(
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        "qwen3_next",
        num_hidden_layers=48,
        vocab_size=151936,
        tie_word_embeddings=False,
        hidden_size=2048,
        intermediate_size=5120,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        num_experts=512,
        num_experts_per_tok=10,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    ),
}


def config(name: str) -> PreTrainedConfig:
    """Return the configuration of a model of the table.

    Raises:
        KeyError: the table has no such model.
    """
    from transformers import AutoConfig  # the command line shows the names, and waits for nothing

    published = MODELS[name]
    return AutoConfig.for_model(published.model_type, **published.sizes)
