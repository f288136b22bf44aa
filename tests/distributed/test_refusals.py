"""What transformers and torch do not do with these models, with or without kernels: docs/parallel.md lists it."""

import re

import pytest
import torch
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

from tests.distributed import matrix, refusing

pytestmark = pytest.mark.distributed

# each rank of a group computes its experts for all tokens: by a plan, and from transformers 5.23 on by a name
MASKING = (
    {"ep_plan": {"model.layers.*.mlp.gate": "ep_router", "model.layers.*.mlp.experts": "moe_tp_experts"}}
    if "ep_router" in ALL_PARALLEL_STYLES
    else {"ep_implementation": "all_reduce"}
)


@pytest.mark.parametrize("model", matrix.DENSE)
def test_a_model_without_experts_has_no_expert_parallelism(model, two_ranks, checkpoints):
    for error in two_ranks.run(refusing.error_of_loading, checkpoints[model], {"ep_size": 2, "tp_size": 2}):
        assert re.search("does not define an expert-parallel plan|has no `ep_plan`", error)


def test_router_masking_wants_the_same_tokens_on_all_ranks_of_an_expert_group(two_ranks, checkpoints):
    config = {"ep_size": 2, "fsdp_size": 2} | MASKING
    for error in two_ranks.run(refusing.error_of_loading, checkpoints["Qwen3-MoE"], config):
        assert re.search("`ep_size ?==? ?tp_size`", error)


def test_tensor_parallelism_of_gpt_oss_splits_its_head_only(two_ranks, checkpoints):
    for names in two_ranks.run(refusing.split_parameters, checkpoints["gpt-oss"], {"tp_plan": "auto"}):
        assert names == ["lm_head.weight"]


def test_foreach_of_adamw_does_not_mix_split_and_whole_weights(two_ranks, checkpoints):
    for kernels in (True, False):
        for error in two_ranks.run(refusing.error_of_a_foreach_step, checkpoints["Qwen3"], kernels):
            assert "got mixed torch.Tensor and DTensor" in error


def test_offloaded_weights_need_a_backend_for_the_cpu(two_ranks, checkpoints):
    for error in two_ranks.run(refusing.error_of_offloading, checkpoints["Qwen3"]):
        assert "No backend type associated with device type cpu" in error


def test_transformers_loads_what_is_to_be_offloaded_to_the_device(two_ranks, checkpoints):
    for error in two_ranks.run(refusing.error_of_offloading_by_transformers, checkpoints["Qwen3"]):
        assert "FSDP parameters should be materialized on CPU" in error


@pytest.mark.parametrize("model", matrix.MIXTURES)
def test_experts_that_no_two_ranks_share_get_the_gradients_that_they_get_without(model, two_ranks, checkpoints, truths):
    """Up to transformers 5.22 they are divided twice: it gives their group, of one rank, a factor and the order to sum,
    and FSDP2 divides by the factor in place of the reduction and behind it. With groups of two all is right:
    "EP × FSDP2" on four ranks.
    """
    truth = torch.load(truths[model])[0]
    shares = set()
    for kernels in (True, False):
        for gradients in two_ranks.run(refusing.gradients_with_whole_experts, checkpoints[model], kernels):
            for name, gradient in gradients.items():
                expected, share = truth[f"gradient {name}"], 1
                if ".experts." in name:
                    share = round((expected.norm() / gradient.norm()).item())
                    shares.add(share)
                torch.testing.assert_close(gradient, expected / share, rtol=0, atol=matrix.TOLERANCE, msg=name)
    assert shares in ({1}, {2})
