"""Deep models without weights, and the steps of kernelizing one."""

from collections.abc import Callable

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeForCausalLM

import kernels_ext_npu
from kernels_ext_npu import model_configs
from tests.support.forwards import SIZES

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
    config = model_configs.config("Qwen3-235B-A22B")
    config.num_hidden_layers = layers
    with torch.device("meta"):
        return Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16)


def dense(layers: int) -> PreTrainedModel:
    """Build a model on the NPU, where MLPs are packed; inside a FakeTensorMode."""
    with torch.device("npu"):
        return Qwen3ForCausalLM(Qwen3Config(**SIZES | {"num_hidden_layers": layers}))
