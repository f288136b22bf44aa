"""What transformers and torch do not do with these models, with or without kernels: docs/parallel.md lists it."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import DistributedConfig, PreTrainedModel
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

from tests.distributed import engines, matrix, models
from tests.distributed.models import Tensors


def error_of(
    act: Callable[[PreTrainedModel], object], folder: Path, config: dict[str, Any], kernels: bool = True
) -> str:
    """Return what transformers or torch say to a way to split a model, and to what is done then."""
    with engines.registered(kernels):
        try:
            act(load(folder, config, kernels))
        except (RuntimeError, ValueError) as error:
            return str(error)
    return ""


def load(folder: Path, config: dict[str, Any], kernels: bool) -> PreTrainedModel:
    """Load a model that transformers splits, or a whole one onto the device of this process."""
    options = (
        {"distributed_config": DistributedConfig(**config)} if config else {"device_map": f"npu:{dist.get_rank()}"}
    )
    return models.load(folder, use_kernels=kernels, **options)


def nothing(model: PreTrainedModel) -> None:
    """Only load it."""


def forward(model: PreTrainedModel) -> None:
    model(models.tokens(0).npu())


def backward(model: PreTrainedModel) -> None:
    ids = models.tokens(0).npu()
    model(ids, labels=ids).loss.backward()


def foreach_step(model: PreTrainedModel) -> None:
    """The default AdamW."""
    backward(model)
    torch.optim.AdamW(model.parameters()).step()


def offload(model: PreTrainedModel) -> None:
    """Weights on the CPU, in a process group without a backend for it."""
    fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    backward(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if isinstance(norm, DTensor):
        norm.full_tensor()


def split_parameters(folder: Path) -> list[str]:
    """Return the parameters of which a process has a part only under tensor parallelism."""
    with engines.registered(True):
        model = load(folder, {"tp_plan": "auto"}, True)
        return [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]


def gradients_with_whole_experts(folder: Path, kernels: bool) -> Tensors:
    """Of a step with expert parallelism over all processes, each of which has a batch of its own."""
    with engines.registered(kernels):
        model = load(folder, {"ep_size": 2, "fsdp_size": 2}, kernels)
        ids = models.tokens(0).chunk(2)[dist.get_rank()].npu()
        model(ids, labels=ids).loss.backward()
        return engines.gradients(model)


pytestmark = pytest.mark.distributed

# each rank of a group computes its experts for all tokens: by a plan, and from transformers 5.23 on by a name
MASKING = (
    {"ep_plan": {"model.layers.*.mlp.gate": "ep_router", "model.layers.*.mlp.experts": "moe_tp_experts"}}
    if "ep_router" in ALL_PARALLEL_STYLES
    else {"ep_implementation": "all_reduce"}
)


REFUSED = [
    *(
        (
            model,
            {"ep_size": 2, "tp_size": 2},
            nothing,
            True,
            "does not define an expert-parallel plan|has no `ep_plan`",
        )
        for model in matrix.DENSE
    ),
    # the same tokens on all ranks of a group
    (
        *("Qwen3-MoE", {"ep_size": 2, "fsdp_size": 2} | MASKING, nothing, True),
        "`ep_size ?==? ?tp_size`",
    ),
    *(
        ("Qwen3", {"tp_plan": "auto"}, foreach_step, kernels, "got mixed torch.Tensor and DTensor")
        for kernels in (True, False)
    ),
    ("Qwen3", {}, offload, True, "No backend type associated with device type cpu"),
    # transformers loads to the device what is to be offloaded
    (
        *("Qwen3", {"fsdp_size": 2, "fsdp_cpu_offload": True}, forward, True),
        "FSDP parameters should be materialized on CPU",
    ),
]


@pytest.mark.parametrize(("model", "config", "act", "kernels", "sentence"), REFUSED)
def test_what_is_refused(model, config, act, kernels, sentence, two_ranks, checkpoints):
    for error in two_ranks.run(error_of, act, checkpoints[model], config, kernels):
        assert re.search(sentence, error)


def test_tensor_parallelism_of_gpt_oss_splits_its_head_only(two_ranks, checkpoints):
    assert two_ranks.run(split_parameters, checkpoints["gpt-oss"]) == [["lm_head.weight"]] * 2


@pytest.mark.parametrize("model", matrix.MIXTURES)
def test_experts_that_no_two_ranks_share_get_the_gradients_that_they_get_without(model, two_ranks, checkpoints, truths):
    """Up to transformers 5.22 they are divided twice: it gives their group, of one rank, a factor and the order to sum,
    and FSDP2 divides by the factor in place of the reduction and behind it. With groups of two all is right:
    "EP × FSDP2" on four ranks.
    """
    truth = torch.load(truths[model])[0]
    shares = set()
    for kernels in (True, False):
        for gradients in two_ranks.run(gradients_with_whole_experts, checkpoints[model], kernels):
            for name, gradient in gradients.items():
                expected, share = truth[f"gradient {name}"], 1
                if ".experts." in name:
                    share = round((expected.norm() / gradient.norm()).item())
                    shares.add(share)
                torch.testing.assert_close(gradient, expected / share, rtol=0, atol=matrix.TOLERANCE, msg=name)
    assert shares in ({1}, {2})
