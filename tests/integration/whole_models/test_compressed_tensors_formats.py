"""Checkpoints of compressed-tensors in int8 and int4, as it writes them: what they are on the NPU, and after a call."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams
from transformers import AutoModelForCausalLM

import kernels_ext_npu
from tests.support import zoo

pytestmark = pytest.mark.usefixtures("registered")
CHANNELS = QuantizationArgs(num_bits=8, strategy="channel")
TOKENS = QuantizationArgs(num_bits=8, strategy="token", dynamic=True)
GROUPS = QuantizationArgs(num_bits=4, strategy="group", group_size=32)
SCHEMES: dict[str, dict[str, Any]] = {
    "W8A16": {"weights": CHANNELS, "format": "int-quantized"},
    "W8A16 packed": {"weights": CHANNELS, "format": "pack-quantized"},
    "W8A8": {"weights": CHANNELS, "input_activations": TOKENS, "format": "int-quantized"},
    "W4A16": {"weights": GROUPS, "format": "pack-quantized"},
}
IDS = torch.arange(8)[None]


def write(folder: Path, scheme: dict[str, Any], architecture: str = "qwen3") -> None:
    """Write a tiny checkpoint as compressed-tensors does: rounded to the nearest, scaled by what lies furthest."""
    model = zoo.build(architecture).bfloat16()
    groups = {"group_0": QuantizationScheme(targets=["Linear"], **scheme)}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    for module in model.modules():
        if (found := getattr(module, "quantization_scheme", None)) is not None:
            rows = module.weight.detach().unflatten(1, (-1, found.weights.group_size or module.in_features))
            scale, _ = calculate_qparams(rows.amin(-1), rows.amax(-1), found.weights)
            module.weight_scale.data.copy_(scale)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


def load(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)


def kinds_served(model: Any) -> set[str]:
    return {row.kind for row in kernels_ext_npu.report(model) if row.swapped}


@pytest.mark.parametrize("name", SCHEMES)
def test_the_first_forward_makes_weights_wide(name: str, tmp_path: Path) -> None:
    write(tmp_path, SCHEMES[name])
    model, plain = load(tmp_path, device_map="npu", use_kernels=True), load(tmp_path)
    kept = {"W8A16": torch.int8, "W8A8": torch.int8}.get(name, torch.int32)
    layers = partial(filter, lambda module: getattr(module, "quantization_scheme", None) is not None)
    before = [{p.dtype for p in layer.parameters()} for layer in layers(model.modules())]
    assert len(before) == 14
    assert all(kept in dtypes for dtypes in before)
    with torch.no_grad():
        found, expected = model(input_ids=IDS.npu()).logits.cpu(), plain(input_ids=IDS).logits
    for ours, theirs in zip(layers(model.modules()), layers(plain.modules()), strict=True):
        assert ours.weight.dtype is torch.bfloat16
        assert torch.equal(ours.weight.cpu(), theirs.weight)
    # a bfloat16 model of two layers against itself, in another order; activations in int8 round to 1/127 of their row
    assert (found - expected).abs().max() <= 2.0 ** (-4 if name == "W8A8" else -5) * expected.abs().max()
    assert {"norms", "attention", "gated MLPs", "heads"} <= kinds_served(model)
