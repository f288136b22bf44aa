"""The models that programs start with: one or two layers of each way in which kernels serve a model."""

import copy
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from tests.support.sizes import sizes

SIZES = sizes(
    32, 64, heads=2, keys=2, width=16, layers=2, words=64, max_position_embeddings=32, pad_token_id=0,
    eos_token_id=None, tie_word_embeddings=False,
)  # fmt: skip
ONE = SIZES | {"num_hidden_layers": 1}
EXPERTS = ONE | {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR = SIZES | {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
PICTURE = 61  # the token in whose place a picture is
MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3]}
PICTURES = {
    "text_config": ONE | {"rope_parameters": MROPE},
    "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4},
    "image_token_id": PICTURE,
    "video_token_id": 62,
    "vision_start_token_id": 63,
    "tie_word_embeddings": False,
}
BART = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 32,
    "pad_token_id": 0, "eos_token_id": None, "bos_token_id": 1, "decoder_start_token_id": 1, "dropout": 0.0,
}  # fmt: skip
T5 = {
    "vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0,
    "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 1, "eos_token_id": None,
}  # fmt: skip
BERT = ONE | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERTS = {
    "encoder": BERT | {"model_type": "bert"},
    "decoder": BERT | {"model_type": "bert", "is_decoder": True, "add_cross_attention": True},
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}
# Granite's factors, and a softcap, are what a loss has to know of logits
FACTORS = {"logits_scaling": 0.5, "embedding_multiplier": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3}
SOFTCAP = {"final_logit_softcapping": 2.0, "attn_logit_softcapping": None}
# class, and arguments of its config
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Qwen3ForCausalLM", SIZES),
    "dense with biases": ("GraniteForCausalLM", SIZES | FACTORS | {"mlp_bias": True, "attention_bias": True}),
    "tied embeddings": ("LlamaForCausalLM", ONE | {"tie_word_embeddings": True}),
    "gate and up in one projection": ("Phi3ForCausalLM", ONE),
    "GeGLU, norms around one": ("Gemma2ForCausalLM", ONE | SOFTCAP),
    "experts": ("Qwen3MoeForCausalLM", EXPERTS | {"num_experts": 4}),
    "experts with clipped SwiGLU": ("GptOssForCausalLM", EXPERTS | {"num_local_experts": 4, "intermediate_size": 32}),
    "partial rotation": ("GPTNeoXForCausalLM", ONE | {"rotary_pct": 0.5, "hidden_act": "gelu_fast"}),
    "interleaved rotation": ("GlmForCausalLM", ONE | {"partial_rotary_factor": 0.5}),
    "linear attention": ("Qwen3_5ForCausalLM", LINEAR),
    "pictures": ("Qwen2VLForConditionalGeneration", PICTURES),
    "encoder and decoder": ("BartForConditionalGeneration", BART),
    "relative positions": ("T5ForConditionalGeneration", T5),
    "two models in one": ("EncoderDecoderModel", BERTS),
}
WITH_TARGETS = {"encoder and decoder", "relative positions", "two models in one"}
IDS = torch.randint(2, 60, (2, 5), generator=torch.Generator().manual_seed(0))
PATCHES = torch.randn(8, 96, generator=torch.Generator().manual_seed(2))


def make(variant: str) -> PreTrainedModel:
    """Return a new model of a variant on the CPU, always the same one, in evaluation mode."""
    return copy.deepcopy(_made(variant))


def inputs(variant: str, device: torch.device | str) -> dict[str, Any]:
    """Return the arguments of a forward: ids ``[2, 5]``, for a target the same, and labels so that there is a loss."""
    ids = IDS.to(device)
    target = {"decoder_input_ids": ids.flip(1)} if variant in WITH_TARGETS else {}
    return {"input_ids": ids, "labels": ids, "use_cache": False} | target


def picture(device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return what a forward takes beside: a picture of four patches in the place of the second token of each row."""
    ids = IDS.to(device, copy=True)
    ids[:, 1] = PICTURE
    return {
        "input_ids": ids,
        "pixel_values": PATCHES.to(device, dtype),
        "image_grid_thw": torch.tensor([[1, 2, 2]] * 2, device=device),
        "mm_token_type_ids": (ids == PICTURE).long(),
    }


@cache
def _made(variant: str) -> PreTrainedModel:
    """Build a model whose weights are all of some size: initial ones and zeros would hide what is left out."""
    name, options = VARIANTS[variant]
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**copy.deepcopy(options))).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if "norm" in name and name.endswith("weight"):
                parameter.copy_(1 + drawn / 4)
            else:  # of convolutions more: what is divided by a small norm would differ by more than rounding
                parameter.copy_(drawn / (2 if "conv1d" in name else 6))
    return model
