"""Adapters on weights in four and eight bits: losses and gradients are those of bitsandbytes and peft on the CPU.

Computed in float32, to TOLERANCE of the whole models' tests: a wrong code word or scale is a hundred times that. Rows
are whole blocks: bitsandbytes' library for the CPU, which is the truth here, gives others the scales of neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen3ForCausalLM

import kernels_ext_npu
from kernels_ext_npu.bitsandbytes_backend import registration
from kernels_ext_npu.measuring.costs import host_waits
from tests.support import zoo
from tests.support.nearness import TOLERANCE, assert_gradients_near, assert_near, gradients

pytestmark = [
    pytest.mark.usefixtures("registered"),
    pytest.mark.filterwarnings("ignore:Merge lora module:UserWarning", "ignore:Unmerge lora module:UserWarning"),
    pytest.mark.filterwarnings("ignore:Already unmerged:UserWarning"),  # of layers without the second adapter
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated", "ignore:.*inputs will be cast"),
]

PROJECTIONS = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]


def configuration(bits: str) -> BitsAndBytesConfig:
    if bits == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=bits[:3],
        bnb_4bit_quant_storage=torch.bfloat16 if bits.endswith("as bfloat16") else torch.uint8,
        bnb_4bit_use_double_quant=bits.endswith("nested"),
        bnb_4bit_compute_dtype=torch.float32,
    )


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a checkpoint in few bits, which the CPU has quantised."""
    saved: dict[str, Path] = {}
    config = zoo.build("qwen3").config
    config.intermediate_size = 128
    plain = tmp_path_factory.mktemp("plain")
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(plain)

    def save(bits: str) -> Path:
        if bits not in saved:
            saved[bits] = tmp_path_factory.mktemp("quantised")
            load(plain, "cpu", quantization_config=configuration(bits)).save_pretrained(saved[bits])
        return saved[bits]

    return save


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    """Compile none of the formulas that bitsandbytes has for the CPU."""
    with torch.compiler.set_stance("force_eager"):
        yield


def load(folder: Path, device: str, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, device_map=device, dtype=torch.float32, use_kernels=device == "npu", **options
    )


def adapted(folder: Path, device: str, checkpointing: bool | None = False, **options: Any) -> PeftModel:
    """Return a model as QLoRA trains it, with the same adapters on each device; checkpointing is None or reentrant."""
    asked = {} if checkpointing is None else {"gradient_checkpointing_kwargs": {"use_reentrant": checkpointing}}
    model = prepare_model_for_kbit_training(load(folder, device), checkpointing is not None, **asked)
    model = get_peft_model(model, LoraConfig(**({"r": 4, "target_modules": PROJECTIONS} | options))).train()
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.copy_(torch.randn(parameter.shape) * 0.1 + (parameter.dim() == 1))
    return kernels_ext_npu.kernelize(model) if device == "npu" else model


def logits(model: nn.Module) -> Tensor:
    ids = torch.arange(18).view(2, 9) * 5 % 64
    return model(input_ids=ids.to(next(model.parameters()).device), use_cache=False).logits


def assert_same_step(model: PeftModel, original: PeftModel) -> None:
    for each in (model, original):
        each.zero_grad()
        logits(each).square().mean().backward()
    assert_near(logits(model), logits(original))
    assert_gradients_near(gradients(model), gradients(original))


def refusals(model: nn.Module) -> set[str | None]:
    """Return why layers with adapters are not served; None of those that are."""
    rows = [row for row in kernels_ext_npu.report(model).projections if "base_layer" not in row.path]
    adapted = [row for row in rows if row.kernel == "lora_linear" or "adapter" in str(row.reason)]
    assert adapted
    return {None if row.swapped else row.reason for row in adapted}


@pytest.mark.parametrize(
    ("bits", "checkpointing"),
    [
        ("nf4, nested", None),
        ("nf4, nested", False),
        ("nf4, nested", True),
        ("nf4 as bfloat16", None),
        ("fp4", None),
        ("int8", False),
    ],
)
def test_a_step_is_that_of_the_cpu_and_no_host_waits(
    quantised: Callable[[str], Path], bits: str, checkpointing: bool | None
) -> None:
    model, original = (adapted(quantised(bits), device, checkpointing) for device in ("npu", "cpu"))
    assert refusals(model) == {None}
    assert_same_step(model, original)
    with host_waits() as waits:
        logits(model).square().mean().backward()
    assert waits.number == 0


@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True, "lora_alpha": 3},
        {"target_modules": ["q_proj", "v_proj", "down_proj"], "modules_to_save": ["norm", "lm_head"]},
        {"target_modules": ["gate_proj", "up_proj"]},
        {"use_dora": True, "target_modules": ["o_proj"]},
    ],
    ids=["rsLoRA", "modules to save", "gate and up alone", "DoRA"],
)
def test_kinds_of_adapters_are_those_of_the_cpu(quantised: Callable[[str], Path], options: dict[str, Any]) -> None:
    model, original = (adapted(quantised("nf4, nested"), device, **options) for device in ("npu", "cpu"))
    (reason,) = refusals(model)
    assert reason == ("its adapter default is of another kind: DoraLinearVariant" if "use_dora" in options else None)
    mlps = {row.reason for row in kernels_ext_npu.report(model) if row.class_name == "Qwen3MLP"}
    both = {"gate_proj", "up_proj"} <= set(options.get("target_modules", PROJECTIONS))
    why = "two products, since a projection is a bitsandbytes.nn.modules.Linear4bit"
    assert ("gate and up are made into one weight by each product" in mlps) is both
    assert (why in mlps) is not both
    assert_same_step(model, original)


@pytest.mark.parametrize("bits", ["nf4, nested", "int8"])
def test_adapters_are_added_switched_merged_and_unloaded(quantised: Callable[[str], Path], bits: str) -> None:
    model, original = (adapted(quantised(bits), device) for device in ("npu", "cpu"))
    for each in (model, original):
        each.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj", "up_proj"], lora_alpha=6))
        torch.manual_seed(2)
        for name, parameter in each.named_parameters():
            if ".other." in name:
                parameter.data.copy_(torch.randn(parameter.shape) * 0.1)
        each.base_model.set_adapter(["default", "other"])
    assert_same_step(model, original)
    with torch.no_grad(), model.disable_adapter(), original.disable_adapter():
        # of int8 bitsandbytes rounds inputs to eight bits on the NPU, and not on the CPU
        assert_near(logits(model), logits(original), 0.02 if bits == "int8" else TOLERANCE)
    with torch.no_grad():
        for each in (model, original):
            each.set_adapter("other")
            each.merge_adapter()
        assert_near(logits(model), logits(original), 0.05)  # quantised anew, by the CPU not always to the nearest code
        for each in (model, original):
            each.base_model.unmerge_adapter()
        assert_near(logits(model), logits(original), 0.05)


def test_dropout_draws_what_peft_draws(quantised: Callable[[str], Path]) -> None:
    """Against peft's own calls on the NPU, whose masks are not the CPU's.

    Weights in four bits alone: those in eight bitsandbytes trains by another formula on the NPU than on the CPU.
    """
    model = adapted(quantised("nf4"), "npu", None, lora_dropout=0.3)
    assert refusals(model) == {None}
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        model.zero_grad()
        logits(model).square().mean().backward()
        found.append(gradients(model))
        kernels_ext_npu.restore(model)
    assert_gradients_near(found[0], found[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_frozen_layers_in_16_bits_go_through_bitsandbytes(quantised: Callable[[str], Path], dtype: torch.dtype) -> None:
    folder = quantised("nf4, nested")
    model = AutoModelForCausalLM.from_pretrained(folder, device_map="npu", dtype=dtype, use_kernels=True)
    rows = [row for row in kernels_ext_npu.report(model).projections if row.class_name == "Linear4bit"]
    assert {row.reason for row in rows} == {"bitsandbytes computes it, by its operators for the NPU"}
    with torch.no_grad(), host_waits() as waits:
        found = logits(model)
    assert waits.number == 0
    with torch.no_grad():
        expected = logits(load(folder, "cpu").train())  # for eval it lays out rows anew, which takes others than these
    # the checkpoint computes in float32; norms and sums between layers are rounded
    assert_near(found, expected, 2**-6 if dtype is torch.bfloat16 else 2**-9)


def test_without_operators_of_bitsandbytes_peft_computes(
    quantised: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "is_registered", lambda: False)
    rows = kernels_ext_npu.report(adapted(quantised("nf4"), "npu")).projections
    reasons = {row.reason for row in rows if "base_layer" not in row.path}
    assert (
        "of the layer that it adapts: bitsandbytes has no operators for the NPU: it was imported before torch_npu"
        in (reasons)
    )
