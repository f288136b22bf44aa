"""The models that are trained on several devices, and the one process on the CPU that they are compared with."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from tests.support.sizes import sizes

Tensors = dict[str, Tensor]
ROWS, LENGTH = 4, 8

# Halves of gate and up are multiples of 64 bytes on each of two ranks, in bfloat16, too: what the operators ask for.
# A head size of 32 is what the rotary operator takes on every path.
TEXT = sizes(
    64, 128, heads=4, keys=2, width=32, layers=2, words=96, max_position_embeddings=64, tie_word_embeddings=False,
    sliding_window=4, pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
GPT_OSS = TEXT | {"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2}
# What the first token gives is a product of its query and its key, which may be close to zero: by the norm behind it
# small differences become large ones, unless its epsilon is larger than usual.
MIXED: dict[str, Any] = {"rms_norm_eps": 1e-2, "layer_types": ["linear_attention", "full_attention"]}
LINEAR = MIXED | {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
LATENT = MIXED | {
    "num_key_value_heads": 4,
    "linear_num_heads": 4,
    "linear_head_dim": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
# An image of 4 x 4 patches is four tokens behind one that begins it.
IMAGE, IMAGE_START = 2, 3
GRIDS = torch.tensor([[1, 4, 4]] * 2)
ROTATED = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
WITH_IMAGES: dict[str, Any] = {
    "text_config": TEXT | {"hidden_size": 128, "rope_parameters": ROTATED},
    "vision_config": {
        "depth": 2, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "patch_size": 4,
        "temporal_patch_size": 2, "out_hidden_size": 128, "window_size": 16, "fullatt_block_indexes": [1],
    },
    "image_token_id": IMAGE,
    "vision_start_token_id": IMAGE_START,
    "tie_word_embeddings": False,
}  # fmt: skip
BERT = TEXT | {"tie_word_embeddings": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LLAMA4 = TEXT | {
    "layer_types": ["chunked_attention", "full_attention"],
    "no_rope_layers": [1, 0],
    "moe_layers": [],
    "intermediate_size_mlp": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3": ("qwen3", TEXT),
    "Llama": ("llama", TEXT | {"mlp_bias": True, "attention_bias": True}),
    "Gemma 3": (
        "gemma3_text",
        TEXT | {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 32},
    ),
    "Qwen3-MoE": ("qwen3_moe", TEXT | EXPERTS | {"num_experts": 4, "norm_topk_prob": True}),
    "gpt-oss": ("gpt_oss", GPT_OSS),
    "gpt-oss, no groups": ("gpt_oss", GPT_OSS | {"num_key_value_heads": 4}),
    "Qwen3, tied": ("qwen3", TEXT | {"tie_word_embeddings": True}),
    "Qwen3, groups": ("qwen3", TEXT | {"num_attention_heads": 8, "num_key_value_heads": 4}),
    "Qwen3-Next": (
        "qwen3_next",
        TEXT | EXPERTS | LINEAR | {"num_experts": 4, "shared_expert_intermediate_size": 64, "norm_topk_prob": True},
    ),
    "Qwen3.5": ("qwen3_5_text", TEXT | LINEAR),
    "Kimi Linear": ("kimi_linear", TEXT | EXPERTS | LATENT | {"num_local_experts": 4}),
    "Qwen2.5-VL": ("qwen2_5_vl", WITH_IMAGES),
    # these give their masks no positions
    "BERT": ("bert", BERT),
    "BERT, decoder": ("bert", BERT | {"is_decoder": True}),
    "Llama 4": ("llama4_text", LLAMA4 | {"attention_chunk_size": LENGTH}),
    "Llama 4, chunks": ("llama4_text", LLAMA4 | {"attention_chunk_size": LENGTH - 2}),
}
# With these no token lies so close between two experts that bfloat16 sends it to another one.
_SEEDS = {"Qwen3-MoE": 16, "gpt-oss": 242}

STEPS = 2
# A step of AdamW is rate · m / (√v + eps). Where eps is as large as the rate, a difference in a gradient moves a weight
# by no more than that difference; with the usual eps of 1e-8 the first step would be the sign of the gradient, and
# differences of 1e-8 around zero would move weights by the whole rate.
RATE = EPS = 1e-2


def save(name: str, folder: Path) -> None:
    """A random checkpoint. No norm weight is one, no bias and no sink zero: that would hide who ignores them."""
    model_type, sizes = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEEDS.get(name, 1))
        model = _auto(sizes).from_config(AutoConfig.for_model(model_type, **sizes))
        with torch.no_grad():
            for path, parameter in model.named_parameters():
                if "norm" in path or path.endswith(("bias", "sinks")):
                    parameter.add_(0.3 * torch.randn_like(parameter))
                else:
                    scale = 0.1 if "vision_config" in sizes else 0.15  # it is twice as wide
                    scale = 0.5 if "conv1d" in path else scale  # four values a channel: keys are not to be short
                    parameter.copy_(scale * torch.randn_like(parameter))
    model.save_pretrained(folder)


def tokens(step: int) -> Tensor:
    """The whole batch of a step; every row differs."""
    return torch.randint(2, TEXT["vocab_size"], (ROWS, LENGTH), generator=torch.Generator().manual_seed(10 + step))


def given(model: Any, step: int) -> Tensors:
    """The whole batch as the model takes it: the first two rows have an image each, if it sees."""
    ids = tokens(step)
    if not hasattr(model.config, "vision_config"):
        return {"input_ids": ids}
    ids[ids <= IMAGE_START] = IMAGE_START + 1
    ids[: len(GRIDS), 1:6] = torch.tensor([IMAGE_START, *[IMAGE] * 4])
    pixels = torch.randn(32, 96, generator=torch.Generator().manual_seed(step))
    kinds = (ids == IMAGE).int()
    return {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": GRIDS, "mm_token_type_ids": kinds}


def make_optimizer(model: nn.Module, rate: float = RATE) -> torch.optim.Optimizer:
    """AdamW, tensor by tensor: torch's foreach refuses DTensors next to plain tensors, which TP has side by side."""
    return torch.optim.AdamW(model.parameters(), lr=rate, eps=EPS, weight_decay=0.1, foreach=False)


def load(folder: Path, is_adapted: bool = False, **options: Any) -> Any:
    """A checkpoint in training mode; with adapters, these alone are trained."""
    auto = _auto(PreTrainedConfig.get_config_dict(folder)[0])
    model = auto.from_pretrained(folder, dtype=torch.float32, **options).train()
    if not is_adapted:
        return model
    from peft import LoraConfig, get_peft_model  # seconds, for few tests

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)  # zeros hide half
        return get_peft_model(model, config)


def _auto(sizes: dict[str, Any]) -> Any:
    return AutoModelForImageTextToText if "vision_config" in sizes else AutoModelForCausalLM


def train(folder: Path, steps: int = STEPS, rate: float = RATE, is_adapted: bool = False) -> list[Tensors]:
    """What one process on the CPU computes without kernels, with transformers' plainest formulas.

    Returns:
        For each step loss and gradients, ``loss`` and ``gradient <name>``, and behind the last the weights,
        ``weight <name>``.
    """
    model = load(folder, is_adapted, experts_implementation="eager", attn_implementation="eager")
    optimizer = make_optimizer(model, rate)
    found = []
    for step in range(steps):
        batch = given(model, step)
        loss = model(**batch, labels=batch["input_ids"], use_cache=False).loss
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found.append({"loss": loss.detach()} | {f"gradient {name}": each for name, each in gradients.items()})
        optimizer.step()
        optimizer.zero_grad()
    return [*found, {f"weight {name}": parameter.detach() for name, parameter in model.named_parameters()}]
