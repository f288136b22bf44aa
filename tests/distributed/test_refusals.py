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


REFUSED = [
    *(
        (
            model,
            {"ep_size": 2, "tp_size": 2},
            refusing.nothing,
            True,
            "does not define an expert-parallel plan|has no `ep_plan`",
        )
        for model in matrix.DENSE
    ),
    # the same tokens on all ranks of a group
    (
        *("Qwen3-MoE", {"ep_size": 2, "fsdp_size": 2} | MASKING, refusing.nothing, True),
        "`ep_size ?==? ?tp_size`",
    ),
    *(
        ("Qwen3", {"tp_plan": "auto"}, refusing.foreach_step, kernels, "got mixed torch.Tensor and DTensor")
        for kernels in (True, False)
    ),
    ("Qwen3", {}, refusing.offload, True, "No backend type associated with device type cpu"),
    # transformers loads to the device what is to be offloaded
    (
        *("Qwen3", {"fsdp_size": 2, "fsdp_cpu_offload": True}, refusing.forward, True),
        "FSDP parameters should be materialized on CPU",
    ),
]


@pytest.mark.parametrize(("model", "config", "act", "kernels", "sentence"), REFUSED)
def test_what_is_refused(model, config, act, kernels, sentence, two_ranks, checkpoints):
    for error in two_ranks.run(refusing.error_of, act, checkpoints[model], config, kernels):
        assert re.search(sentence, error)


def test_tensor_parallelism_of_gpt_oss_splits_its_head_only(two_ranks, checkpoints):
    assert two_ranks.run(refusing.split_parameters, checkpoints["gpt-oss"]) == [["lm_head.weight"]] * 2


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
