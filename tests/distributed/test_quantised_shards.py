"""Adapters on weights in four bits whose bytes ranks share: FSDP, with ``bnb_4bit_quant_storage``."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen3ForCausalLM

import kernels_ext_npu
from tests.distributed import engines
from tests.support import zoo
from tests.support.nearness import assert_gradients_near, assert_near

pytestmark = pytest.mark.distributed
PROJECTIONS = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]


def adapted(folder: Path, device: torch.device | str, checkpointing: bool) -> Any:
    """A model as QLoRA trains it, with the same adapters everywhere."""
    is_npu = str(device).startswith("npu")
    model = AutoModelForCausalLM.from_pretrained(folder, device_map=device, dtype=torch.float32, use_kernels=is_npu)
    model = prepare_model_for_kbit_training(model, checkpointing, {"use_reentrant": False})
    model = get_peft_model(model, LoraConfig(r=4, target_modules=PROJECTIONS)).train()
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.copy_(torch.randn(parameter.shape) * 0.1)
    return kernels_ext_npu.kernelize(model) if is_npu else model


def step(model: Any, device: torch.device | str) -> Tensor:
    ids = (torch.arange(18).view(2, 9) * 5 % 64).to(device)
    logits = model(input_ids=ids, use_cache=False).logits
    logits.square().mean().backward()
    return logits.detach().cpu()


def run(folder: Path, engine: str, checkpointing: bool) -> dict[str, Any]:
    """The logits and gradients of a step on every rank, the same rows on each, and which layers have kernels."""
    device = torch.device("npu", dist.get_rank())
    with engines.registered(True), torch.compiler.set_stance("force_eager"):
        model = adapted(folder, device, checkpointing)
        trained = engines.engine(engine, "qwen3").wrap(model)
        logits = step(trained, device)
        rows = kernels_ext_npu.report(model).projections
        gradients = engines.gradients(trained)
    adapters = {name.removeprefix("base_model.model."): gradient for name, gradient in gradients.items()}
    kernels = {row.kernel if row.swapped else row.reason for row in rows if "base_layer" not in row.path}
    return {"logits": logits, "gradients": adapters, "kernels": kernels}


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a checkpoint in NF4 whose bytes lie in numbers of float32, which FSDP can share."""
    config = zoo.build("qwen3").config
    config.intermediate_size = 128
    plain, folder = (tmp_path_factory.mktemp(name) for name in ("plain", "quantised"))
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(plain)
    stored = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_quant_storage=torch.float32,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, quantization_config=stored).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("engine", "checkpointing", "kernel"),
    [
        ("FSDP2", False, "lora_linear"),
        ("FSDP2", True, "lora_linear"),
        ("FSDP1", True, "its weight is a part of another tensor, as under FSDP1"),
    ],
)
def test_a_step_is_that_of_the_cpu(two_ranks, quantised: Path, engine: str, checkpointing: bool, kernel: str) -> None:
    with torch.compiler.set_stance("force_eager"):  # bitsandbytes compiles its formulas for the CPU
        original = adapted(quantised, "cpu", checkpointing)
        logits = step(original, "cpu")
    expected = {
        name.removeprefix("base_model.model."): parameter.grad
        for name, parameter in original.named_parameters()
        if parameter.requires_grad
    }
    for found in two_ranks.run(run, quantised, engine, checkpointing):
        assert_near(found["logits"], logits)
        # FSDP1 has zeros of frozen weights
        assert_gradients_near({name: found["gradients"][name] for name in expected}, expected)
        assert [kernel in reason for reason in found["kernels"]] == [True]
