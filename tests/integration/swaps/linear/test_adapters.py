"""Adapters through peft, on what kernels serve: outputs and gradients are those of the CPU without kernels.

Adapters of gate and up alone are in test_packing.py. To TOLERANCE of the whole models' tests, in float32.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

import kernels_ext_npu
from tests.support import zoo
from tests.support.nearness import assert_gradients_near, assert_near, gradients

pytestmark = pytest.mark.usefixtures("registered")

PROJECTIONS = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "all projections": ("qwen3", {"target_modules": PROJECTIONS}),
    "q, k and v, and norms of their own": (
        "qwen3",
        {"target_modules": ["q_proj", "k_proj", "v_proj"], "modules_to_save": ["input_layernorm", "q_norm", "norm"]},
    ),
    "norms and MLPs of their own": (
        "gemma3_text",
        {"target_modules": ["q_proj"], "modules_to_save": ["q_norm", "mlp"]},
    ),
    "gate and up in one": ("phi3", {"target_modules": ["gate_up_proj"]}),
    "weights of gate and up": ("qwen3", {"target_parameters": ["mlp.gate_proj.weight", "mlp.up_proj.weight"]}),
    "experts": ("qwen3_moe", {"target_parameters": EXPERTS}),
    "experts with biases": ("gpt_oss", {"target_parameters": EXPERTS}),
    "router": ("qwen3_moe", {"target_parameters": ["mlp.gate.weight"]}),
}


def adapted(base: nn.Module, options: dict[str, Any], device: str) -> PeftModel:
    """With kernels on the NPU, swapped in before the adapters; those of test_adapted_layers.py are after them."""
    model = copy.deepcopy(base).to(device)
    if device == "npu":
        kernels_ext_npu.kernelize(model)
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **options)).train()
    return kernels_ext_npu.kernelize(model) if device == "npu" else model


def same_adapters(base: nn.Module, options: dict[str, Any]) -> tuple[PeftModel, PeftModel]:
    original, model = adapted(base, options, "cpu"), adapted(base, options, "npu")
    trained = {name: p for name, p in original.named_parameters() if p.requires_grad}
    model.load_state_dict({name: p.detach().npu() for name, p in trained.items()}, strict=False)
    return model, original


def logits(model: nn.Module, name: str) -> Tensor:
    plain = model.get_base_model() if isinstance(model, PeftModel) else model
    return model(**zoo.inputs(name, plain), use_cache=False).logits


def assert_equal_gradients(name: str, model: PeftModel, original: PeftModel, backwards: int = 1) -> None:
    for each in (model, original):
        for _ in range(backwards):
            logits(each, name).square().mean().backward()
    assert_gradients_near(gradients(model), gradients(original))


@pytest.mark.parametrize("case", CASES)
def test_adapters_are_trained_switched_off_merged_and_unloaded(case: str) -> None:
    name, options = CASES[case]
    model, original = same_adapters(zoo.build(name), options)
    assert_equal_gradients(name, model, original, backwards=2)
    with torch.no_grad():
        expected = logits(original, name)
        assert_near(logits(model, name), expected)
        with model.disable_adapter():
            assert_near(logits(model, name), logits(zoo.build(name), name))
        model.merge_adapter()
        assert_near(logits(model, name), expected)
        model.unmerge_adapter()
        assert_near(logits(model, name), expected)
        plain = kernels_ext_npu.kernelize(model.merge_and_unload())
        assert_near(logits(plain, name), expected)


@pytest.mark.parametrize("checkpointing", [None, False, True])
@pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_adapters_of_a_quantised_base_are_trained(checkpointing: bool | None) -> None:
    """checkpointing is None or use_reentrant; without gradients of the inputs the second would train nothing."""
    base = zoo.build("qwen3").requires_grad_(False)
    quantize_(base, Int8WeightOnlyConfig(), lambda module, path: isinstance(module, nn.Linear) and "layers" in path)
    model, original = same_adapters(base, {"target_modules": ["q_proj", "v_proj", "down_proj"]})
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    assert_equal_gradients("qwen3", model, original, backwards=2)


@pytest.mark.long
@pytest.mark.parametrize("case", ["all projections", "q, k and v, and norms of their own", "gate and up in one"])
def test_adapters_compile(case: str) -> None:
    """Those of experts do not, with kernels or without: peft parametrizes their weights in the forward."""
    torch._dynamo.reset()
    name, options = CASES[case]
    model, original = same_adapters(zoo.build(name), options)
    model.compile(backend="aot_eager", fullgraph=True)
    assert_equal_gradients(name, model, original)
