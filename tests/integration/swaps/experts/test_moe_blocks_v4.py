"""Mixtures of experts with a list of experts in a model: found, swapped, packed, reported, and given back."""

import copy

import accelerate
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

import kernels_ext_npu
import softnpu
from kernels_ext_npu.patterns.moe.moe_blocks_v4 import (
    PATTERNS,
    DeepseekV2MoE,
    DeepseekV3MoE,
    MixtralSparseMoeBlock,
    Qwen2MoeSparseMoeBlock,
    Qwen3MoeSparseMoeBlock,
)
from kernels_ext_npu.patterns.norms.rms_norms import LlamaRMSNorm

pytestmark = pytest.mark.usefixtures("registered")
BLOCKS = [reference.module for reference in PATTERNS]
each_block = pytest.mark.parametrize("cls", BLOCKS, ids=lambda cls: cls.__name__)


class Model(PreTrainedModel):
    """Two layers of norms and mixtures, as transformers loads them."""

    config_class = LlamaConfig

    def __init__(self, config: LlamaConfig, cls: type[nn.Module] = Qwen3MoeSparseMoeBlock) -> None:
        super().__init__(config)
        self.norms = nn.ModuleList(LlamaRMSNorm(32) for _ in range(2))
        self.blocks = nn.ModuleList(cls(32, 6, 2, 32) for _ in range(2))
        self.post_init()

    def forward(self, x: Tensor) -> Tensor:
        for norm, block in zip(self.norms, self.blocks):
            y = block(norm(x))
            x = x + (y[0] if isinstance(y, tuple) else y)
        return x


def model(cls: type[nn.Module] = Qwen3MoeSparseMoeBlock) -> Model:
    torch.manual_seed(0)
    built = Model(LlamaConfig(hidden_size=32), cls)
    for parameter in built.blocks.parameters():
        nn.init.normal_(parameter, std=0.3)
    return built


def rows(swapped: nn.Module) -> list[kernels_ext_npu.Row]:
    names = {"SparseMoEBlock", "GatedMoEBlock"}
    return [row for row in kernels_ext_npu.report(swapped) if row.kernel in names]


def inputs() -> Tensor:
    return torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1))


def results(built: nn.Module, x: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    built.zero_grad()
    y = built(leaf)
    y.square().sum().backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in built.parameters()]
    return [y.detach(), leaf.grad, *gradients]


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    """2e-6 of the norm: two layers of three products in float32, each with sums in another order."""
    for a, b in zip(found, expected):
        assert (a.cpu() - b).norm() <= 2e-6 * b.norm() + 1e-5


@pytest.mark.parametrize("mode", ["training", "inference"])
@each_block
def test_a_model_computes_what_it_did(cls, mode) -> None:
    original = model(cls).train(mode == "training")
    swapped = kernels_ext_npu.kernelize(copy.deepcopy(original).to("npu"))
    assert [row.swapped for row in rows(swapped)] == [True, True]
    assert {row.reason for row in rows(swapped)} == {None}
    assert {row.kind for row in rows(swapped)} == {"experts"}
    x = inputs().npu()
    softnpu.reset_counters()
    found = results(swapped, x)
    counters = softnpu.counters()
    assert counters["stream_syncs"] == 0
    assert counters["npu_grouped_matmul"] == 12
    assert counters["npu_swiglu"] >= 2
    assert_close(found, results(original, inputs()))
    assert_close(results(swapped, x), results(original, inputs()))


@each_block
def test_names_and_values_stay_and_restored_it_is_the_original_again(cls) -> None:
    original = model(cls)
    swapped = kernels_ext_npu.kernelize(copy.deepcopy(original).to("npu"))
    states = [swapped.state_dict(), copy.deepcopy(swapped).state_dict()]
    kernels_ext_npu.restore(swapped)
    assert not any(row.swapped for row in kernels_ext_npu.report(swapped))
    for found in (*states, swapped.state_dict()):
        assert list(found) == list(original.state_dict())
        assert all(torch.equal(found[name].cpu(), value) for name, value in original.state_dict().items())
    softnpu.reset_counters()
    found = results(swapped, inputs().npu())
    assert "npu_grouped_matmul" not in softnpu.counters()
    assert_close(found, results(original, inputs()))


def lora(module: nn.Module) -> nn.Module:
    config = LoraConfig(target_modules=r".*experts\.\d+\.up_proj", init_lora_weights=False)
    torch.manual_seed(1)
    return inject_adapter_in_model(config, module)


def test_experts_with_lora_keep_their_forward() -> None:
    adapted = lora(model())
    swapped = kernels_ext_npu.kernelize(copy.deepcopy(adapted).to("npu"))
    for row in rows(swapped):
        assert not row.swapped
        assert row.reason.startswith("a projection of an expert is a peft.tuners.lora.layer.Linear")
    assert_close(results(swapped, inputs().npu()), results(adapted, inputs()))


def test_lora_after_the_swap_is_respected_and_reported() -> None:
    original = model()
    swapped = lora(kernels_ext_npu.kernelize(copy.deepcopy(original).to("npu")))
    for row in rows(swapped):
        assert row.swapped
        assert row.reason == "expert by expert, since a projection is a peft.tuners.lora.layer.Linear"
    softnpu.reset_counters()
    found = results(swapped, inputs().npu())
    assert "npu_grouped_matmul" not in softnpu.counters()
    assert_close(found[:2], results(lora(original), inputs())[:2])


def test_hooks_of_accelerate_on_the_experts_run() -> None:
    original = model()
    swapped = kernels_ext_npu.kernelize(copy.deepcopy(original).to("npu"))
    for block in swapped.blocks:
        for expert in block.experts:
            accelerate.hooks.add_hook_to_module(expert, accelerate.hooks.AlignDevicesHook("npu:0"))
    assert {row.reason for row in rows(swapped)} == {
        "expert by expert, since an expert has hooks or a wrapped forward, which one product would pass by"
    }
    assert_close(results(swapped, inputs().npu()), results(original, inputs()))


class OtherExpert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(32, 32) for _ in range(3))
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))


def replace_expert(block: nn.Module) -> None:
    block.experts[2] = OtherExpert()


def drop_expert(block: nn.Module) -> None:
    del block.experts[5]


def move_rank(block: nn.Module) -> None:
    block.ep_rank = 1


@pytest.mark.parametrize(
    ("cls", "change", "reason"),
    [
        (
            Qwen2MoeSparseMoeBlock,
            replace_expert,
            "an expert is a OtherExpert, whose forward is not that of a gated MLP",
        ),
        (MixtralSparseMoeBlock, drop_expert, "its gate chooses among 6 experts, and it has 5"),
        (DeepseekV3MoE, drop_expert, "its gate chooses among 6 experts, and it has 5"),
        (DeepseekV2MoE, move_rank, "it has the experts of rank 1 only"),
    ],
)
def test_what_the_pattern_does_not_show_is_refused_with_a_reason(cls, change, reason) -> None:
    built = model(cls)
    for block in built.blocks:
        change(block)
    swapped = kernels_ext_npu.kernelize(built.to("npu"))
    assert [(row.swapped, row.reason) for row in rows(swapped)] == [(False, reason)] * 2


def test_bfloat16_takes_the_weights_as_they_lie() -> None:
    swapped = kernels_ext_npu.kernelize(model().to(torch.bfloat16).to("npu"))
    softnpu.reset_counters()
    x = inputs().to(torch.bfloat16).npu()
    softnpu.reset_counters()
    with torch.no_grad():
        swapped(x)
    counters = softnpu.counters()
    assert counters["npu_grouped_matmul"] == 4
    assert counters["npu_swiglu"] == 2
    assert not counters.keys() & {"stack", "cat", "clone"}
    assert counters["stream_syncs"] == 0
