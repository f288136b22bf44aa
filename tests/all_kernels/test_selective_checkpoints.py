"""Selective checkpoints around functions of the kernels: whatever they keep, gradients are those of the formula.

They keep what operators return, and give it back by the number of the call when the forward runs again: a function has
to call the same ones, and to hide those that write to what others have returned.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.all_kernels.differentiated import CASES, Case
from tests.all_kernels.test_autograd_promises import each_case, gradients, on_both
from tests.support.local_kernels import kernel

POLICIES: dict[str, Callable[[str], bool]] = {
    "products": lambda name: "mm" in name or "matmul" in name,
    "npu": lambda name: name.startswith("npu."),
    "all": lambda name: True,
}
each_policy = pytest.mark.parametrize("policy", POLICIES)
SHAPES = ((6, 32), (4, 32), (16, 4))  # an input, and the two factors of an adapter
LABELS = torch.tensor([3, 15, 0, 7, 7, 9])


def selectively(policy: str, function: Callable, *inputs: Tensor) -> Tensor:
    def decide(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if POLICIES[policy](str(op)) else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, decide)
    return checkpoint(function, *inputs, use_reentrant=False, context_fn=contexts)


def nested(policy: str, function: Callable, *inputs: Tensor) -> Tensor:
    return selectively(policy, partial(checkpoint, function, use_reentrant=False), *inputs)


def checkpointed(case: Case, policy: str, around: Callable = selectively) -> Case:
    return case._replace(ours=partial(around, policy, case.ours))


@each_policy
@each_case
def test_gradients_are_those_of_the_formula(case: Case, policy: str) -> None:
    on_both(checkpointed(case, policy), gradients)


@each_policy
@pytest.mark.parametrize("name", ["rms_norm", "linear_cross_entropy", "fused_experts", "attention"])
def test_another_checkpoint_may_lie_inside(name: str, policy: str) -> None:
    on_both(checkpointed(CASES[name], policy, nested), gradients)


def weight_like(x: Tensor) -> Tensor:
    """A frozen weight ``[16, 32]``."""
    return torch.arange(512.0, device=x.device).view(16, 32).cos().to(x.dtype)


def one_adapter(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    package = kernel("Linear")
    return package.lora_linear(x, weight_like(x), None, [package.Adapter(a, b, 0.5)])


def several_adapters(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    package = kernel("Linear")
    layers = [(weight_like(x), None, package.Adapter(a, b, scale)) for scale in (0.5, 2.0)]
    return torch.cat(package.lora_linears(x, layers))


def adapted(x: Tensor, a: Tensor, b: Tensor, *scales: float) -> Tensor:
    return torch.cat([x @ weight_like(x).mT + scale * x @ a.mT @ b.mT for scale in scales])


ADAPTERS = {
    "one": Case(one_adapter, lambda *xs: adapted(*xs, 0.5), SHAPES),
    "several": Case(several_adapters, lambda *xs: adapted(*xs, 0.5, 2.0), SHAPES),
}


@each_policy
@pytest.mark.parametrize("number", ADAPTERS)
def test_the_gradients_of_adapters_are_those_of_the_formula(number: str, policy: str) -> None:
    on_both(checkpointed(ADAPTERS[number], policy), gradients)


def frozen_head(x: Tensor) -> Tensor:
    weight = weight_like(x)
    return kernel("CrossEntropy").linear_cross_entropy(x, weight, LABELS.to(x.device), softcap=2.0)


def capped(x: Tensor) -> Tensor:
    return F.cross_entropy(2 * torch.tanh(x @ weight_like(x).mT / 2), LABELS)


@each_policy
def test_logits_of_a_frozen_head_become_their_gradient_unseen(policy: str) -> None:
    on_both(checkpointed(Case(frozen_head, capped, ((6, 32),)), policy), gradients)
