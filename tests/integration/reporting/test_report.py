"""The report: every norm of a model, what serves it or why nothing does, read from the model as it is."""

import json
from types import MethodType

import pytest
import torch
from kernels import get_local_kernel
from torch import nn

import kernels_ext_npu
from tests.support import zoo
from tests.support.tiny import Clone


def test_lists_every_norm_like_module(registered) -> None:
    for name in ("qwen3", "gemma3", "qwen2_5_vl", "gpt2", "bert", "zamba2", "whisper"):
        model = zoo.build(name).to("npu")
        report = kernels_ext_npu.report(kernels_ext_npu.kernelize(model))
        norms = [row for row in report if row.kind == "norms"]
        expected = {path for path, module in model.named_modules() if "norm" in type(module).__name__.lower()}
        assert {row.path for row in norms} == expected
        if name == "gpt2":  # whose layer norms are listed as what they are
            assert {(row.reason, row.is_candidate, row.kernel) for row in norms} == {("not an RMS norm", False, None)}


def test_prints_as_a_table_by_class_and_equal_layers_on_one_line(registered) -> None:
    model = kernels_ext_npu.kernelize(zoo.build("gemma3_text").to("npu"))
    text = str(kernels_ext_npu.report(model))
    assert text.startswith("13 of 13 norms, 2 of 2 gated MLPs, 2 of 2 rotary calls, 1 of 1 rotary tables")
    assert "2 × model.layers.*.self_attn.q_norm" in text
    assert text.count("Gemma3RMSNorm") == text.count("→ RMSNormZeroCentered") == 1
    assert max(map(len, text.splitlines())) <= 80


def test_to_json_has_a_row_a_module(registered) -> None:
    model = kernels_ext_npu.kernelize(zoo.build("zamba2").to("npu"))
    rows = json.loads(kernels_ext_npu.report(model).to_json())
    assert {key for row in rows for key in row} == {"path", "class", "kernel", "swapped", "reason"}
    kept = [row for row in rows if not row["swapped"]]
    scans = {"mamba2_chunk_scan", "mamba2_selective_state_update", "mamba2_split_conv1d_scan_combined"}
    assert {row["class"] for row in kept} == scans
    assert all(row["reason"] and row["kernel"] is None for row in kept)
    assert all(row["reason"] is None for row in rows if row["swapped"])
    layers = {"CausalConv1dBeforeScan", "CausalConv1dUpdate", "RMSNorm", "RotaryEmbedding", "RotaryPosEmb"}
    layers |= {"FusedAdaptedMLP", "MambaRMSNormGated", "linear_cross_entropy", "npu_flash_attention"}
    assert {row["kernel"] for row in rows if row["swapped"]} == layers


@pytest.mark.parametrize(
    ("device", "registers", "reason"),
    [
        ("cpu", True, "it is on cpu: load with device_map='npu', or move the model and call kernelize(model)"),
        ("npu", False, "kernels are not registered: call kernels_ext_npu.register() before the model is loaded"),
        ("npu", True, "the model was loaded without use_kernels=True"),
    ],
)
def test_what_was_not_swapped_says_what_to_do(device, registers, reason) -> None:
    if registers:
        kernels_ext_npu.register()
    row, *_ = kernels_ext_npu.report(zoo.build("qwen3").to(device))
    assert row.reason.startswith(reason)
    assert row.kernel == "RMSNorm"


def test_somebody_elses_kernel_is_not_ours(registered, tmp_path) -> None:
    layer = get_local_kernel(Clone(tmp_path).repository).layers.Doubled
    model = nn.ModuleDict({"norm": nn.RMSNorm(4, eps=1e-6)}).to("npu")
    model["norm"].forward = MethodType(layer.forward, model["norm"])
    (row,) = kernels_ext_npu.report(model)
    assert (row.swapped, row.reason) == (False, "served by Doubled of the kernel tiny, which is not ours")


class StackedMoE(nn.Module):
    """Multiplies with weights of all experts in one, as gpt-fast does."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 16)), nn.Parameter(torch.randn(4, 16, 8))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        hidden = torch.einsum("th,tih->ti", x, self.up[chosen]).relu()
        return torch.einsum("ti,thi->th", hidden, self.down[chosen]) * weights[:, None]


class NamedMoELayer(nn.Module):
    """Has experts by names, as fairseq's NLLB does."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 2)
        self.experts = nn.ModuleDict({name: nn.Linear(16, 16) for name in ("first", "second")})

    def forward(self, x):
        weights = self.gate(x).softmax(-1).unsqueeze(-2)
        return sum(w * expert(x) for w, expert in zip(weights.unbind(-1), self.experts.values()))


class OneMoE(nn.Module):
    """Holds no experts itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = NamedMoELayer()

    def forward(self, x):
        return self.inner(x)


def test_a_block_of_experts_that_nothing_serves_has_a_row(registered) -> None:
    model = kernels_ext_npu.kernelize(nn.ModuleList([StackedMoE(), OneMoE()]).to("npu"))
    report = kernels_ext_npu.report(model)
    assert {(row.path, row.kernel, row.kind) for row in report} == {
        ("0", None, "experts"),
        ("1.inner", None, "experts"),
    }
    assert all(row.reason.startswith("no kernel computes what its forward computes") for row in report)


class LazyMoE(nn.Module):
    """Knows no shapes before its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.weights = nn.LazyLinear(4), nn.UninitializedParameter()


@pytest.mark.parametrize("name", ["LazyMoE", "LazyNorm"])
def test_modules_that_have_no_shapes_yet_are_left_alone(registered, name: str) -> None:
    model = kernels_ext_npu.kernelize(nn.ModuleList([type(name, (LazyMoE,), {"forward": OneMoE.forward})()]).to("npu"))
    assert not any(row.swapped for row in kernels_ext_npu.report(model))
