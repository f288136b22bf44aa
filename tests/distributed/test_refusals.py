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
from transformers import DistributedConfig, GptOssConfig, PreTrainedModel

from tests.distributed import engines, matrix, models

pytestmark = pytest.mark.distributed


def load(folder: Path, config: dict[str, Any], kernels: bool) -> PreTrainedModel:
    """Load a model that transformers splits, or a whole one onto the device of this process."""
    placed: dict[str, Any] = {"device_map": f"npu:{dist.get_rank()}"}
    if config:
        placed = {"distributed_config": DistributedConfig(**config)}
    return models.load(folder, use_kernels=kernels, **placed)


def error_of(act: Callable[[PreTrainedModel], object], folder: Path, config: dict[str, Any], kernels: bool) -> str:
    """Return what transformers or torch say to a way to split a model, and to what is done then."""
    with engines.registered(kernels):
        try:
            act(load(folder, config, kernels))
        except (RuntimeError, ValueError) as error:
            return str(error)
    return ""


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


EXPERTS, SHARDS = {"ep_size": 2, "tp_size": 2}, {"ep_size": 2, "fsdp_size": 2}
OFFLOADED = {"fsdp_size": 2, "fsdp_cpu_offload": True}
REFUSED = [
    ("Qwen3", EXPERTS, backward, True, "does not define an expert-parallel plan|has no `ep_plan`"),
    # the same tokens on all ranks of a group
    ("Qwen3-MoE", SHARDS | engines.masking("gate"), backward, True, "`ep_size ?==? ?tp_size`"),
    ("Qwen3", {"tp_plan": "auto"}, foreach_step, True, "got mixed torch.Tensor and DTensor"),
    ("Qwen3", {"tp_plan": "auto"}, foreach_step, False, "got mixed torch.Tensor and DTensor"),
    ("Qwen3", {}, offload, True, "No backend type associated with device type cpu"),
    # transformers loads to the device what is to be offloaded
    ("Qwen3", OFFLOADED, backward, True, "FSDP parameters should be materialized on CPU"),
]


@pytest.mark.parametrize(("model", "config", "act", "kernels", "sentence"), REFUSED)
def test_what_is_refused(model, config, act, kernels, sentence, two_ranks, checkpoints):
    for error in two_ranks.run(error_of, act, checkpoints(model), config, kernels):
        assert re.search(sentence, error)


def test_transformers_has_no_plan_for_tensor_parallelism_of_the_layers_of_gpt_oss():
    assert GptOssConfig().base_model_tp_plan is None


def gradients_with_whole_experts(folder: Path, kernels: bool) -> models.Tensors:
    """Of a step with expert parallelism over all processes, each of which has a batch of its own."""
    with engines.registered(kernels):
        model = load(folder, SHARDS, kernels)
        ids = models.tokens(0).chunk(2)[dist.get_rank()].npu()
        model(ids, labels=ids).loss.backward()
        return engines.gradients(model)


@pytest.mark.parametrize("model", matrix.MIXTURES)
def test_experts_that_no_two_ranks_share_get_the_gradients_that_they_get_without(model, two_ranks, checkpoints, truths):
    """Up to transformers 5.22 they are divided twice: it gives their group, of one rank, a factor and the order to sum,
    and FSDP2 divides by the factor in place of the reduction and behind it. With groups of two all is right:
    "EP × FSDP2" on four ranks.
    """
    truth = truths(model)[0]
    shares = set()
    for kernels in (True, False):
        for gradients in two_ranks.run(gradients_with_whole_experts, checkpoints(model), kernels):
            for name, gradient in gradients.items():
                expected, share = truth[f"gradient {name}"], 1
                if ".experts." in name:
                    share = round((expected.norm() / gradient.norm()).item())
                    shares.add(share)
                torch.testing.assert_close(gradient, expected / share, rtol=0, atol=matrix.TOLERANCE, msg=name)
    assert shares in ({1}, {2})
