"""Each parallel style of transformers, and plans of torch, around what kernels serve.

The kernel runs inside, values and gradients hold. Styles for what no kernel serves, as embeddings, are not here. Linear
layers are: an MLP calls those of its projections. Whole models are in test_same_numbers.py and
test_latent_heads.py.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers.distributed import expert_parallel, tensor_parallel
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nanochat.modeling_nanochat import NanoChatRMSNorm
from transformers.models.olmo3.modeling_olmo3 import Olmo3RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.models.t5.modeling_t5 import T5LayerNorm
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from tests.distributed import modules
from tests.distributed.modules import SIZE, Along, Holder, normal
from tests.distributed.parallel import assert_right, compare, mesh
from tests.rmsnorm.norm_modules import instance

pytestmark = pytest.mark.distributed

X = (2, 6, SIZE)


class Case(NamedTuple):
    """A module, the styles of its parts, and what the first of two ranks calls in forward and backward.

    Styles are transformers', or a function that applies torch's own. ``alone`` is false where the style makes of one
    device's result another one.
    """

    build: Callable[[], nn.Module]
    plan: dict[str, str] | Callable[[nn.Module], None]
    calls: dict[str, int]
    inputs: tuple[Tensor, ...] = (normal(*X),)
    alone: bool = True


NORM = {"npu_rms_norm": 1, "npu_rms_norm_backward": 1}
SWIGLU = {"npu_swiglu": 1, "npu_swiglu_backward": 1}
EXPERTS = {"npu_grouped_matmul": 6}


def divided(norm: Callable[[], nn.Module], inputs: int = 1) -> Case:
    tensors = tuple(normal(*X, seed=seed) for seed in range(inputs))
    return Case(lambda: Along(norm(), 1), {"block": "sequence_parallel"}, NORM, tensors)


# ---- plans of torch --------------------------------------------------------------------------------------------------
class Decoder(nn.Module):
    """A norm, an MLP and a residual, with activations divided along the sequence outside of the MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = LlamaRMSNorm(SIZE), modules.mlp().block

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def sequence_parallel(module: nn.Module) -> None:
    """torch's tutorial for sequence parallelism, with DTensors throughout."""
    plan = {
        "block.norm": SequenceParallel(),
        "block.mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "block.mlp.gate_proj": ColwiseParallel(use_local_output=False),
        "block.mlp.up_proj": ColwiseParallel(use_local_output=False),
        "block.mlp.down_proj": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(module, mesh(), plan)


def divided_projections(module: nn.Module) -> None:
    """Gate and up come as DTensors."""
    columns = ColwiseParallel(use_local_output=False)
    names = [name for name, _ in module.block.named_children() if name in ("gate_proj", "up_proj", "gate_up_proj")]
    plan = {f"block.{name}": columns for name in names} | {"block.down_proj": RowwiseParallel(input_layouts=Shard(-1))}
    parallelize_module(module, mesh(), plan)


def divided_norm(module: nn.Module) -> None:
    parallelize_module(module, mesh(), {"block": SequenceParallel(use_local_output=True)})


DISPATCHED = {  # in the order of models': experts are divided before they are wrapped
    "block.experts.gate_up_proj": "grouped_gemm",
    "block.experts.down_proj": "grouped_gemm",
    "block.experts": "ep_dispatch_experts",
}

CASES = {
    "colwise_rep, rowwise_rep": Case(
        modules.mlp,
        {"block.gate_proj": "colwise_rep", "block.up_proj": "colwise_rep", "block.down_proj": "rowwise_rep"},
        SWIGLU,
    ),
    "colwise_gather_output, rowwise_split_input": Case(
        modules.fused_mlp,
        {"block.gate_up_proj": "colwise_gather_output", "block.down_proj": "rowwise_split_input"},
        SWIGLU,
    ),
    "packed_colwise": Case(
        modules.fused_mlp, {"block.gate_up_proj": "packed_colwise", "block.down_proj": "rowwise"}, SWIGLU
    ),
    "all_reduce": Case(modules.mlp, {"block": "all_reduce"}, SWIGLU, alone=False),
    "replicate": Case(lambda: Holder(Qwen3RMSNorm(SIZE)), {"block": "replicate"}, NORM),
    "sequence_parallel": divided(lambda: Qwen3RMSNorm(SIZE)),
    "sequence_parallel, zero-centred": divided(lambda: Gemma3RMSNorm(SIZE)),
    "sequence_parallel, cast last": divided(lambda: Olmo3RMSNorm(SIZE)),
    "sequence_parallel, T5": divided(lambda: T5LayerNorm(SIZE)),
    "sequence_parallel, without weight": divided(lambda: NanoChatRMSNorm(1e-6)),
    "sequence_parallel, gated": divided(lambda: Qwen3NextRMSNormGated(SIZE), 2),
    "sequence_parallel, gated before": divided(lambda: instance(BambaRMSNormGated), 2),
    "sequence_parallel, gated before, in groups": divided(lambda: Zamba2RMSNormGated(SIZE, SIZE // 4), 2),
    "moe_tp_experts, whole": Case(modules.mixture, {"block.experts": "moe_tp_experts"}, EXPERTS, alone=False),
    "ep_dispatch_experts, a rank without rows": Case(modules.OneSided, DISPATCHED, EXPERTS),
    "ep_dispatch_experts, a rank without tokens": Case(modules.mixture, DISPATCHED, EXPERTS, (normal(1, 1, SIZE),)),
    "torch's sequence parallel": Case(lambda: Along(Decoder(), 1), sequence_parallel, NORM),
    "torch's gate and up": Case(modules.mlp, divided_projections, {}),
    "torch's gate and up, GELU": Case(modules.gelu_mlp, divided_projections, {}),
    "torch's gate and up in one": Case(modules.fused_mlp, divided_projections, {}),
    "torch's norm": Case(lambda: Along(Qwen3RMSNorm(SIZE), 1, local=True), divided_norm, NORM),
    "torch's norm, uneven": Case(lambda: Along(Qwen3RMSNorm(SIZE), 1), divided_norm, NORM, (normal(2, 5, SIZE),)),
}


def run(name: str, before: bool) -> dict[str, Any]:
    case = CASES[name]

    def apply(module: nn.Module) -> None:
        if callable(case.plan):
            case.plan(module)
        elif case.plan is DISPATCHED:
            expert_parallel.apply_expert_parallelism(module, mesh(), mesh(), DISPATCHED)
        else:  # transformers 5.23 wants parameters by name, as its models make them of their plans
            weights = {f"{path}.weight": style for path, style in case.plan.items()}
            named = dict(module.named_parameters())
            plan = {path: style for path, style in weights.items() if path in named} | case.plan
            tensor_parallel.apply_tensor_parallelism(module, mesh(), plan)

    return compare(case.build, apply, case.inputs, before, case.alone)


@pytest.mark.parametrize("before", [False, True], ids=["parallel first", "kernels first"])
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_runs_inside_and_nothing_changes(two_ranks, name, before) -> None:
    outcomes = two_ranks.run(run, name, before)
    assert_right(outcomes)
    for outcome in outcomes:
        calls, expected = outcome["calls"], CASES[name].calls
        assert {operator: calls.get(operator, 0) for operator in expected} == expected
        assert not outcome["added"]
        assert all(swapped for swapped, _ in outcome["rows"].values()), outcome["rows"]
