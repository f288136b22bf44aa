"""Every router of transformers that a kernel serves: the values, experts, dtypes and gradients of its own forward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import kernels_ext_npu
import softnpu
from kernels_ext_npu import catalogue
from kernels_ext_npu.coverage import survey
from kernels_ext_npu.matching.lookup import find_reference
from tests.support.counted import counted
from tests.support.experts_classes import EXPERTS, HIDDEN, Config

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("registered")]
SERVED = [cls for cls in survey.classes(catalogue.ROUTERS) if find_reference(cls) is not None]


def instance(cls: type[nn.Module], normalises: bool = True) -> nn.Module:
    config = Config()
    config.num_experts_per_tok, config.norm_topk_prob = 2, normalises
    router = cls(config)
    torch.manual_seed(0)
    with torch.no_grad():
        router.weight.normal_()
    return router


def swapped(router: nn.Module) -> nn.Module:
    model = nn.ModuleDict({"router": copy.deepcopy(router)}).to("npu")
    model.train(router.training)
    (row,) = kernels_ext_npu.report(kernels_ext_npu.kernelize(model))
    assert row.kernel.startswith("SoftmaxTopKRouter")
    assert row.swapped, row.reason
    return model["router"]


@counted
def test_these_are_served() -> None:
    assert len(SERVED) == 14


@pytest.mark.parametrize("normalises", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inference_gives_what_the_original_gives(subtests, dtype, normalises) -> None:
    """In float32 to 1e-6, for a product and a softmax; in bfloat16 logits may round to a neighbour of the CPU's."""
    x = torch.randn(3, 7, HIDDEN, dtype=dtype)
    for cls in SERVED:
        with subtests.test(cls.__name__), torch.no_grad():
            original = instance(cls, normalises).to(dtype).eval()
            router = swapped(original)
            softnpu.reset_counters()
            logits, weights, experts = router(x.npu())
            counters = softnpu.counters()
            assert counters["npu_moe_gating_top_k_softmax"] == 1
            assert counters["stream_syncs"] == 0
            # the rest of the original's forward on these very logits: what is compared is the routing
            own = rest_of_forward(original, logits.cpu())
            assert [value.dtype for value in (logits, weights, experts)] == [value.dtype for value in own]
            assert torch.equal(experts.cpu(), own[2])
            tolerance = {"rtol": 1e-6, "atol": 0} if weights.dtype is torch.float32 else {"rtol": 2**-8, "atol": 0}
            torch.testing.assert_close(weights.cpu(), own[1], **tolerance)


def rest_of_forward(router: nn.Module, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The router's own forward with a product that gives these logits."""
    twin = copy.deepcopy(router)
    twin.weight = nn.Parameter(torch.eye(EXPERTS, dtype=logits.dtype))
    twin.hidden_dim = EXPERTS
    return twin(logits)


@pytest.mark.parametrize("normalises", [True, False])
def test_training_gives_the_originals_gradients(subtests, normalises) -> None:
    """Through weights and logits: auxiliary losses read those. To 1e-6 for sums in another order."""
    x = torch.randn(21, HIDDEN)
    for cls in SERVED:
        with subtests.test(cls.__name__):
            original = instance(cls, normalises).train()
            found = []
            for router, device in ((swapped(original), "npu"), (original, "cpu")):
                leaf = x.to(device, copy=True).requires_grad_()
                softnpu.reset_counters()
                logits, weights, experts = router(leaf)
                (weights * torch.linspace(-1, 1, weights.numel(), device=device).view_as(weights)).sum().backward(
                    retain_graph=True
                )
                logits.square().mean().backward()
                assert softnpu.counters().get("stream_syncs", 0) == 0
                found.append([logits, weights, experts, leaf.grad, router.weight.grad])
            for a, b in zip(*found):
                assert a.dtype == b.dtype
                assert (a.detach().cpu().double() - b.detach().double()).norm() <= 1e-6 * b.detach().double().norm()


def test_a_router_that_is_decorated_and_computes_something_else_keeps_its_forward() -> None:
    """Laguna's scores with a sigmoid, and transformers decorates it for the same layer as Qwen3.5's."""
    (laguna,) = [cls for cls in survey.classes(catalogue.ROUTERS) if cls.__name__ == "LagunaTopKRouter"]
    assert laguna.kernel_layer_name == "SoftmaxTopKRouter"
    config = Config()
    config.num_experts_per_tok = 2
    model = nn.ModuleDict({"router": laguna(config)}).to("npu")
    nn.init.normal_(model["router"].weight)
    (row,) = kernels_ext_npu.report(kernels_ext_npu.kernelize(model))
    assert (row.swapped, row.reason) == (False, "no kernel computes what its forward computes")
    softnpu.reset_counters()
    model["router"](torch.randn(4, HIDDEN, device="npu"))
    assert "npu_moe_gating_top_k_softmax" not in softnpu.counters()
