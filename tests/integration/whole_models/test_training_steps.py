"""Ten steps of training of whole models with all kernels, beside the same steps of the original: losses and weights."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

import kernels_ext_npu
from tests.support import zoo

pytestmark = pytest.mark.usefixtures("registered")
# A step of AdamW is rate · m / (√v + eps). With an eps as large as the rate a difference in a gradient moves a weight
# by no more than that difference; with the usual one the first step would be the sign of the gradient, and what is
# rounded around zero would move weights by the whole rate.
RATE = EPS = 1e-2
TOLERANCE = 1e-5  # float32: sums in another order, of ten steps
KINDS: dict[str, dict[str, Any] | None] = {
    "all weights": None,
    "adapters": {},
    "adapters of queries and values": {"target_modules": ["q_proj", "v_proj"]},
    "adapters with dropout": {"lora_dropout": 0.3},
}


def build(name: str, options: dict[str, Any] | None) -> nn.Module:
    model = zoo.build(name)
    if options is None:
        return model.train()
    torch.manual_seed(1)
    given = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False} | options
    return get_peft_model(model, LoraConfig(**given)).train()


def train(name: str, model: nn.Module, accumulate: int) -> list[float]:
    """Ten steps of AdamW with clipping; the losses before each."""
    torch.manual_seed(2)
    plain = model.get_base_model() if isinstance(model, PeftModel) else model
    batches = [zoo.inputs(name, plain, seed=seed) for seed in range(accumulate)]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, eps=EPS)
    losses = []
    for _ in range(10):
        for batch in batches:
            loss = model(**batch, labels=batch["input_ids"]).loss / accumulate
            loss.backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def assert_trains_as(name: str, model: nn.Module, original: nn.Module, accumulate: int) -> None:
    before = {path: p.detach().clone() for path, p in original.named_parameters() if p.requires_grad}
    losses, expected = train(name, model, accumulate), train(name, original, accumulate)
    torch.testing.assert_close(losses, expected, rtol=TOLERANCE, atol=0)
    assert expected[-1] < 0.99 * expected[0]
    for path, weight in original.named_parameters():
        if path in before:
            found = model.get_parameter(path).detach().to(weight.device)
            moved = (weight - before[path]).norm()
            assert moved > 100 * TOLERANCE * weight.norm(), path
            assert (found - weight).norm() <= TOLERANCE * weight.norm(), path


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("qwen3", "all weights"),
        ("qwen3", "adapters"),
        pytest.param("qwen3", "adapters of queries and values", marks=pytest.mark.long),
        *[pytest.param("llama", kind, marks=pytest.mark.long) for kind in ("all weights", "adapters")],
        *[pytest.param("gemma3_text", kind, marks=pytest.mark.long) for kind in ("all weights", "adapters")],
    ],
)
def test_ten_steps_are_those_of_the_original_on_the_cpu(name: str, kind: str) -> None:
    """Gradients of two batches are accumulated in each."""
    model, original = kernels_ext_npu.kernelize(build(name, KINDS[kind]).npu()), build(name, KINDS[kind])
    served = {row.kernel for row in kernels_ext_npu.report(model).projections if row.swapped}
    assert served == ({"lora_linear"} if KINDS[kind] is not None else set())
    assert_trains_as(name, model, original, 2)


@pytest.mark.parametrize("name", ["qwen3", pytest.param("llama", marks=pytest.mark.long)])
def test_ten_steps_with_dropout_are_those_of_the_original_on_the_device(name: str) -> None:
    """Which draws the same masks."""
    options = KINDS["adapters with dropout"]
    model, original = kernels_ext_npu.kernelize(build(name, options).npu()), build(name, options).npu()
    assert_trains_as(name, model, original, 1)
