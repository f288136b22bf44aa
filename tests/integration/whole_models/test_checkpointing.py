"""Activation checkpointing: what is computed again gives the same gradients, whatever a kernel had kept.

To the norm of all gradients, TOLERANCE of the whole models' tests: float32, sums in another order.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import kernels_ext_npu
from tests.support import nearness, zoo
from tests.support.nearness import assert_gradients_near

pytestmark = pytest.mark.usefixtures("registered")

# a packed MLP with SwiGLU, one with GeGLU, experts with a SwiGLU, with the clipped one and biases
NAMES = ["qwen3", "gemma3_text", "qwen3_moe", "gpt_oss"]
POLICIES: dict[str, Callable[[str], bool]] = {
    "products": lambda name: "mm" in name or "matmul" in name,
    "npu": lambda name: name.startswith("npu."),
    "all": lambda name: True,
}


def keeping(policy: str) -> Callable[..., CheckpointPolicy]:
    def decide(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = POLICIES[policy](str(op))
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return decide


def build(name: str, device: str) -> nn.Module:
    model = zoo.build(name).to(device).train()
    return kernels_ext_npu.kernelize(model) if device == "npu" else model


def gradients(model: nn.Module, name: str, times: int = 1) -> dict[str, Tensor]:
    """Of the mean of as many backwards through one graph."""
    loss = zoo.logits(name, model, use_cache=False).square().mean() / times
    for left in reversed(range(times)):
        loss.backward(retain_graph=left > 0)
    return nearness.gradients(model)


@functools.cache
def expected(name: str) -> dict[str, Tensor]:
    return gradients(build(name, "cpu"), name)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_both_kinds_of_checkpointing_give_the_gradients_of_the_cpu(name: str, reentrant: bool, npu_counters) -> None:
    model = build(name, "npu")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_gradients_near(gradients(model, name), expected(name))
    norms = sum(1 for _, module in model.named_modules() if "norm" in type(module).__name__.lower())
    assert npu_counters()["npu_rms_norm"] == 2 * norms - 1  # the last one lies in no layer
    model.zero_grad(set_to_none=True)
    assert_gradients_near(gradients(model, name, times=2), expected(name))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NAMES)
def test_selective_checkpointing_takes_what_was_saved_for_what_it_is(name: str, policy: str) -> None:
    """It finds results by the number of calls of an operator: a forward has to call the same ones again."""
    model = build(name, "npu")

    contexts = functools.partial(create_selective_checkpoint_contexts, keeping(policy))
    for layer in model.model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, context_fn=contexts)
    assert_gradients_near(gradients(model, name), expected(name))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "granite"])
def test_selective_checkpointing_around_a_loss_gives_that_loss(name: str, policy: str) -> None:
    """Everything lies inside: rotary embeddings, and logits that are computed for nobody."""
    model, plain = build(name, "npu"), build(name, "cpu")
    contexts = functools.partial(create_selective_checkpoint_contexts, keeping(policy))

    def loss(model: nn.Module, around: Callable) -> Tensor:
        ids = torch.arange(2, 14, device=model.device).view(2, 6)
        embedded = model.model.embed_tokens(ids)
        found = around(lambda x: model(inputs_embeds=x, labels=ids, use_cache=False).loss, embedded)
        found.backward()
        return found

    around = functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)
    nearness.assert_near(loss(model, around), loss(plain, lambda function, x: function(x)))
    assert_gradients_near(nearness.gradients(model), nearness.gradients(plain))


@pytest.mark.long
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_both_kinds_of_checkpointing_compile(name: str, reentrant: bool, whole: bool) -> None:
    torch._dynamo.reset()
    model = build(name, "npu")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    options = {"backend": "aot_eager", "fullgraph": True}
    for module in [model] if whole else model.model.layers:
        module.compile(**options)
    assert_gradients_near(gradients(model, name), expected(name))
