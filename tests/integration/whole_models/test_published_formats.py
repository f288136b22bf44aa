"""Checkpoints in few bits: transformers makes FP8 and MXFP4 wide, as docs/served.md says, and kernels serve that."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import kernels_ext_npu
from tests.support import zoo

pytestmark = pytest.mark.usefixtures("registered")
BLOCK = 32
# the numbers of four bits, two of the exponent and one of the mantissa: OCP Microscaling Formats 1.0, 5.3.3
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def fp8(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Quantise projections by blocks of 32 × 32; returns the tensors of the checkpoint, and what they stand for."""
    stored, exact = dict(tensors), {}
    for name, weight in tensors.items():
        if name.endswith("proj.weight"):
            blocks = weight.float().unfold(0, BLOCK, BLOCK).unfold(1, BLOCK, BLOCK)
            scales = blocks.abs().amax((-1, -2)) / 448
            wide = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            stored[name] = (weight.float() / wide).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scales
            exact[name] = (stored[name].float() * wide).bfloat16()
    return stored, exact


def mxfp4(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Quantise experts by rows of 32, with a power of two for each."""
    stored, exact = {}, {}
    for name, weight in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = weight
            continue
        blocks = weight.float().transpose(1, 2).unflatten(-1, (-1, BLOCK))
        exponents = torch.ceil(torch.log2(blocks.abs().amax(-1) / 6))
        numbers = ((blocks / 2 ** exponents[..., None])[..., None] - FP4).abs().argmin(-1)
        stored[f"{name}_blocks"] = (numbers[..., ::2] | numbers[..., 1::2] << 4).to(torch.uint8)
        stored[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
        exact[name] = (FP4[numbers] * 2 ** exponents[..., None]).flatten(-2).transpose(1, 2).bfloat16()
    return stored, exact


FORMATS: dict[str, tuple[str, Callable, dict]] = {
    "FP8": (
        "qwen3",
        fp8,
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK], "fmt": "e4m3"},
    ),
    "MXFP4": (
        "gpt_oss",
        mxfp4,
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_transformers_makes_it_wide_and_kernels_serve_it(name: str, tmp_path: Path) -> None:
    architecture, quantise, described = FORMATS[name]
    zoo.build(architecture).bfloat16().save_pretrained(tmp_path)
    stored, exact = quantise(load_file(tmp_path / "model.safetensors"))
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": described}))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="npu", use_kernels=True, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert exact
    for path, weight in exact.items():
        assert torch.equal(model.get_parameter(path).cpu(), weight), path
    served = {row.kind for row in kernels_ext_npu.report(model) if row.swapped}
    assert {"norms", "attention", "experts" if name == "MXFP4" else "gated MLPs"} <= served
    with torch.no_grad():
        assert model(input_ids=torch.arange(8)[None].npu()).logits.isfinite().all()


@pytest.mark.parametrize(
    ("described", "wanted"),
    [
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
            "optimum|gptqmodel|GPU",
        ),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, "gptqmodel"),
    ],
    ids=["GPTQ", "AWQ"],
)
def test_transformers_refuses_it_and_says_what_it_wants(described: dict, wanted: str, tmp_path: Path) -> None:
    """As long as gptqmodel is not there, and for GPTQ optimum."""
    zoo.build("qwen3").save_pretrained(tmp_path)
    stored = {}
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        stored[name] = weight
        if name.endswith("proj.weight"):
            path, (outputs, inputs) = name.removesuffix("weight"), stored.pop(name).shape
            shapes = {"qweight": (inputs // 8, outputs), "qzeros": (inputs // 32, outputs // 8)}
            stored |= {path + part: torch.zeros(shape, dtype=torch.int32) for part, shape in shapes.items()}
            stored[path + "scales"] = torch.ones(inputs // 32, outputs, dtype=torch.float16)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": described}))
    with pytest.raises((ImportError, RuntimeError), match=wanted):
        AutoModelForCausalLM.from_pretrained(tmp_path, device_map="npu", use_kernels=True)
