"""Deep models without weights, and the steps of kernelizing one."""

from collections.abc import Callable

import torch
from transformers import AutoConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeForCausalLM

import kernels_ext_npu
from tests.support.forwards import SIZES

# https://huggingface.co/Qwen/Qwen3-235B-A22B/blob/main/config.json
QWEN3_235B_A22B = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_hidden_layers": 94,
    "vocab_size": 151936,
}

STEPS: dict[str, Callable[[PreTrainedModel], object]] = {
    "kernelize()": kernels_ext_npu.kernelize,
    "kernelize() again": kernels_ext_npu.kernelize,
    "eval()": lambda model: model.eval(),  # transformers kernelizes whenever the mode changes
    "train()": lambda model: model.train(),
    "report()": kernels_ext_npu.report,
    "print(report)": lambda model: str(kernels_ext_npu.report(model)),
    "restore()": kernels_ext_npu.restore,
}


def qwen3_235b_a22b(layers: int) -> PreTrainedModel:
    """Build Qwen3-235B-A22B on meta, with some of its layers."""
    config = AutoConfig.for_model(**QWEN3_235B_A22B | {"num_hidden_layers": layers})
    with torch.device("meta"):
        return Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16)


def dense(layers: int) -> PreTrainedModel:
    """Build a model on the NPU, where MLPs are packed; inside a FakeTensorMode."""
    with torch.device("npu"):
        return Qwen3ForCausalLM(Qwen3Config(**SIZES | {"num_hidden_layers": layers}))
