"""Every router of transformers that a kernel serves: the values, experts, dtypes and gradients of its own forward."""

import copy
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from kernels_ext_npu import catalogue
from kernels_ext_npu.matching.lookup import find_pattern
from tests.fused_moe.expert_modules import EXPERTS, HIDDEN
from tests.fused_moe.router_classes import by_expert, call, instance
from tests.support import npu_counts, transformers_files
from tests.support import swapped as swapping

pytestmark = pytest.mark.usefixtures("registered")
NARROW = {"GroupedSoftmaxTopKRouterNarrow"}  # served in float32 only
FLOAT32 = NARROW | {"SigmoidTopKRouterNormalised"}  # or with weights that are
# One launch scores and chooses; these choose in torch.
IN_TORCH = {"TopKSoftmaxRouter", "TopKRouter", "SigmoidScatterRouter"}
ONE_LAUNCH = {"npu_moe_gating_top_k_softmax", "npu_moe_gating_top_k"}
# Of one sum in another order; in bfloat16 of a result and what it is a product of, rounded once each
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 2**-7}
WAYS = pytest.mark.parametrize(
    ("dtype", "normalises"), [(torch.float32, True), (torch.float32, False), (torch.bfloat16, True)], ids=str
)


@cache
def served() -> list[type[nn.Module]]:
    return [cls for cls in transformers_files.classes(catalogue.ROUTERS) if find_pattern(cls) is not None]


def swapped(router: nn.Module) -> nn.Module:
    (device,) = swapping.swapped(router)
    return device


def bound_layer(cls: type[nn.Module]) -> str:
    return find_pattern(cls).layers[0]


def compared(dtype: torch.dtype, normalises: bool) -> list[type[nn.Module]]:
    """All that are written differently; in other ways one for each layer, whose others have the same forward."""
    if dtype is torch.float32 and normalises:
        return transformers_files.differing(served())
    one = {bound_layer(cls): cls for cls in served()}
    return [cls for layer, cls in one.items() if dtype is torch.float32 or layer not in FLOAT32]


def agree(a: Tensor, b: Tensor, tolerance: float) -> bool:
    assert a.dtype == b.dtype
    return bool((a.detach().cpu().double() - b.detach().double()).norm() <= tolerance * b.detach().double().norm())


@WAYS
def test_inference_gives_what_the_original_gives(subtests, dtype, normalises) -> None:
    x = torch.randn(3, 7, HIDDEN, dtype=dtype)
    for cls in compared(dtype, normalises):
        with subtests.test(cls.__name__), torch.no_grad():
            original = instance(cls, norm_topk_prob=normalises).to(dtype).eval()
            router = swapped(original)
            npu_counts.reset()
            logits, weights, experts = call(router, x.npu())
            counters = npu_counts.read()
            assert sum(counters.get(name, 0) for name in ONE_LAUNCH) == (bound_layer(cls) not in IN_TORCH)
            assert counters["stream_syncs"] == 0
            own_logits, own_weights, own_experts = call(original, x)
            assert agree(logits, own_logits, TOLERANCES[dtype])
            assert agree(weights, own_weights, 1)  # the dtype; values are compared by expert
            if experts is not None:
                assert experts.dtype == own_experts.dtype
                assert torch.equal(experts.cpu().sort().values, own_experts.sort().values)
                experts = experts.cpu()
            found = by_expert(weights.cpu(), experts)
            assert agree(found, by_expert(own_weights, own_experts), TOLERANCES[dtype])


@WAYS
def test_training_gives_the_originals_gradients(subtests, dtype, normalises) -> None:
    """Through weights and logits: auxiliary losses read those."""
    x, table = torch.randn(3, 7, HIDDEN, dtype=dtype), torch.linspace(-1, 1, EXPERTS)
    for cls in compared(dtype, normalises):
        with subtests.test(cls.__name__):
            original = instance(cls, norm_topk_prob=normalises).to(dtype).train()
            found = []
            for router, device in ((swapped(original), "npu"), (original, "cpu")):
                leaf = x.to(device, copy=True).requires_grad_()
                npu_counts.reset()
                logits, weights, experts = call(router, leaf)
                (by_expert(weights, experts).float() * table.to(device)).sum().backward(retain_graph=True)
                logits.float().square().mean().backward()
                assert npu_counts.read().get("stream_syncs", 0) == 0
                gradients = [p.grad for p in router.parameters() if p.grad is not None]
                found.append([logits, by_expert(weights, experts), leaf.grad, *gradients])
            assert len(found[0]) == len(found[1]) >= 4
            for a, b in zip(*found):
                assert agree(a, b, TOLERANCES[dtype])


def test_routers_launch_a_fraction() -> None:
    """What is left of a DeepSeek-V3 router in inference is the product, the operator and int64 indices."""
    x, router = torch.randn(21, HIDDEN, dtype=torch.bfloat16).npu(), instance(DeepseekV3TopkRouter).bfloat16()
    router.e_score_correction_bias = router.e_score_correction_bias.float()  # as from_pretrained keeps it
    found = {}
    for name, prepared in (("original", copy.deepcopy(router).npu()), ("swapped", swapped(router))):
        with torch.no_grad():
            npu_counts.reset()
            prepared(x)
            forward = launches()
        leaf, grad = x.clone().requires_grad_(), torch.ones(21, 2, device="npu")
        npu_counts.reset()
        prepared(leaf)[1].backward(grad)
        found[name] = forward, launches()
    assert found == {"original": (21, 37), "swapped": (3, 17)}


def launches() -> int:
    return sum(n for name, n in npu_counts.read().items() if name not in ("stream_syncs", "device_to_host_copies"))


def test_what_a_router_reads_is_read_in_every_forward() -> None:
    original = instance(DeepseekV3TopkRouter)
    router = swapped(original)
    x = torch.randn(9, HIDDEN)
    changes = {
        "num_group": 3,
        "topk_group": 2,
        "top_k": 3,
        "norm_topk_prob": False,
        "routed_scaling_factor": 2.0,
        "e_score_correction_bias": torch.linspace(0.5, -0.5, EXPERTS),
    }
    for name, value in changes.items():
        setattr(original, name, value)
        setattr(router, name, value.npu() if isinstance(value, Tensor) else value)
        with torch.no_grad():
            _, weights, experts = router(x.npu())
            _, own_weights, own_experts = original(x)
        assert torch.equal(experts.cpu().sort().values, own_experts.sort().values), name
        assert agree(by_expert(weights.cpu(), experts.cpu()), by_expert(own_weights, own_experts), 1e-6), name


def test_of_equal_scores_the_first_experts_are_chosen() -> None:
    router = swapped(instance(DeepseekV3TopkRouter, n_group=1))
    router.e_score_correction_bias.zero_()
    _, weights, experts = router(torch.zeros(3, HIDDEN, device="npu"))
    assert experts.tolist() == [[0, 1]] * 3
    assert weights.tolist() == [[0.75, 0.75]] * 3
