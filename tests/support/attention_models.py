"""Tiny models of every kind of attention, and how their inputs are padded and packed."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.support.sizes import sizes

TOKENS, VOCABULARY, WINDOW = 24, 64, 8
NAME = "npu_flash_attention"
# chunked attention refuses every name with "flash" in it: masking_utils.create_chunked_causal_mask
UNNAMED = "npu_fused"
_TEXT = sizes(
    32, 32, heads=4, keys=2, width=16, layers=2, words=VOCABULARY, max_position_embeddings=128, pad_token_id=0,
    bos_token_id=1, eos_token_id=None,
)  # fmt: skip
_WINDOWED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_GEMMA = {"query_pre_attn_scalar": 16}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_YARN_OFF = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "gemma2": ("gemma2", _GEMMA | _WINDOWED),
    "gemma3": ("gemma3_text", _GEMMA | _WINDOWED),
    "gemma3_bidirectional": (
        "gemma3_text", _GEMMA | _WINDOWED | {"use_bidirectional_attention": True},
    ),
    "gpt_oss": ("gpt_oss", _WINDOWED | _EXPERTS | _YARN_OFF),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 2, "n_routed_experts": 4,
            "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": None,
        },
    ),
    "llama4": (
        "llama4_text",
        {
            "attention_chunk_size": WINDOW, "layer_types": ["chunked_attention", "full_attention"], "moe_layers": [],
            "no_rope_layers": [1, 0], "intermediate_size_mlp": 32, "num_local_experts": 2,
        },
    ),
}  # fmt: skip


def build(name: str = "qwen3") -> PreTrainedModel:
    """Make a model as a user does, who says nothing of attention."""
    model_type, own = MODELS[name]
    given = {key: value for key, value in (_TEXT | own).items() if value is not None}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **given)).eval()


def pair(name: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Build a model twice, in float32: with eager attention on the CPU, with ours on the NPU."""
    model = build(name)
    for parameter_name, parameter in model.named_parameters():
        if "sinks" in parameter_name:
            torch.nn.init.normal_(parameter, 1.0, 1.0)
    model.set_attn_implementation("eager")
    ours = copy.deepcopy(model).to("npu")
    ours.config._attn_implementation_internal = UNNAMED if name == "llama4" else NAME
    return model, ours


def ids(batch: int, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, TOKENS), generator=torch.Generator().manual_seed(seed))


def padded(*places: slice) -> Tensor:
    """Return the padding of a batch with a row for each place that is padding, and one without any."""
    mask = torch.ones(len(places) + 1, TOKENS, dtype=torch.long)
    for row, place in zip(mask, places):
        row[place] = 0
    return mask


def places(*sequences: Tensor | int) -> Tensor:
    """Return the positions of a row, of sequences that begin at zero or are said."""
    return torch.cat([torch.arange(part) if isinstance(part, int) else part for part in sequences])[None]


def _packed() -> dict[str, Tensor]:
    return {"input_ids": ids(1), "position_ids": places(5, 12, 7)}


BATCHES: dict[str, Callable[[], dict[str, Tensor]]] = {
    "plain": lambda: {"input_ids": ids(2)},
    "no padding": lambda: {"input_ids": ids(2), "attention_mask": padded(slice(0))},
    "left padding": lambda: {"input_ids": ids(3), "attention_mask": padded(slice(7), slice(1))},
    "right padding": lambda: {"input_ids": ids(3), "attention_mask": padded(slice(-7, None), slice(-1, None))},
    "padding between": lambda: {"input_ids": ids(2), "attention_mask": padded(slice(4, 9))},
    "packed": _packed,
    "packed, from other places": lambda: {"input_ids": ids(1), "position_ids": places(torch.arange(3, 14), 13)},
    "from another place": lambda: {"input_ids": ids(2), "position_ids": places(torch.arange(5, 29))},
}


def on_npu(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value.npu() if isinstance(value, Tensor) else value for name, value in inputs.items()}
