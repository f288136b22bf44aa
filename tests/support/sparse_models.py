"""Tiny models with sparse attention, whose indexers choose four keys."""

import copy
from importlib import import_module

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
    """A tiny model with all its weights drawn, and the same on the NPU with kernels."""
    file = next(m for m in ("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4", "mistral_large4") if _is_in(m, name))
    cls = getattr(import_module(f"transformers.models.{file}.modeling_{file}"), name.partition(",")[0])
    model = cls._from_config(zoo.configure(cls.config_class, zoo.MHA | MODELS[name] | sizes, zoo.SMALL)).eval()
    zoo.randomise(model, 0)
    ours = kernels_ext_npu.kernelize(copy.deepcopy(model).to("npu"))
    model.set_attn_implementation("eager")
    return model, ours


def _is_in(file: str, name: str) -> bool:
    return name.lower().startswith(file.replace("_", ""))
