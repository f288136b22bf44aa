"""Tiny models with latent attention, and with sparse attention, whose indexers choose four keys."""

import copy
from typing import Any

from transformers import PreTrainedModel

import kernels_ext_npu
from tests.support import zoo

SHARED = {"indexer_types": ["full", "shared"]}  # the second layer attends to what the first one chose
OTHERS = SHARED | {"kv_source_layers": [0, 0], "no_rope_layers": [1, 1]}
MODELS = {
    "AXK2ForCausalLM": {},
    "DeepseekV32ForCausalLM": {},
    "GlmMoeDsaForCausalLM": SHARED,
    "HYV4ForCausalLM": SHARED,
    "MistralLarge4ForConditionalGeneration": {"text_config": zoo.MHA | SHARED},
    "MistralLarge4ForConditionalGeneration, keys of another layer": {"text_config": zoo.MHA | OTHERS},
}


def made(name: str, **sizes: int) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Build a tiny model with all its weights drawn, of the zoo or of a class, and the same on the NPU with kernels."""
    config: dict[str, Any] = {} if name in zoo.ARCHITECTURES else zoo.MHA | MODELS.get(name, {}) | sizes
    if "text_config" in config:
        config["text_config"] = config["text_config"] | sizes
    model = zoo.build(name.partition(",")[0], **config)
    ours = kernels_ext_npu.kernelize(copy.deepcopy(model).to("npu"))
    model.set_attn_implementation("eager")
    return model, ours
