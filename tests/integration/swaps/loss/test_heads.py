"""Heads that defer their logits: losses and gradients of whole models, and logits for everybody who looks at them."""

import pickle
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor
from torch.nn import functional as F
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.trainer_pt_utils import LabelSmoother, nested_detach

import kernels_ext_npu
from tests.integration.swaps.loss.heads import (
    assert_same_gradients,
    assert_same_step,
    head_row,
    is_deferred,
    labelled,
    pair,
)
from tests.support import zoo
from tests.support.programs.acts.calls import smoothed_loss


def batch(model: PreTrainedModel) -> dict[str, Tensor]:
    return labelled(zoo.inputs("qwen3", model))


def test_labels_may_be_shifted_by_the_caller() -> None:
    ours, model = pair()
    given = batch(model)
    given["shift_labels"] = F.pad(given["labels"][:, 1:], (0, 1), value=-100)
    assert_same_step(ours, model, given, deferred=True)


def before_a_change(outputs: Any) -> Tensor:
    """Made of logits that are changed in place before anybody looks at it."""
    halves = outputs.logits / 2
    outputs.logits.mul_(3)
    return halves


LOOKS = {
    "before a change": before_a_change,
    "argmax": lambda outputs: outputs.logits.argmax(-1),
    "as a tuple": lambda outputs: outputs.to_tuple()[1] * 1,
    "detached, as Trainer does": lambda outputs: nested_detach(outputs.logits),
    "in place": lambda outputs: outputs.logits.div_(2).clone(),
    "by rows": lambda outputs: torch.stack(list(outputs.logits[:, -1])),
    "pickled with all else": lambda outputs: pickle.loads(pickle.dumps(outputs)).logits,
    "listed": lambda outputs: torch.tensor(outputs.logits[0, 0].tolist()),
    "scaled, capped, viewed": lambda outputs: (torch.tanh(outputs.logits / 3) * 3).view(-1, 100).sum(0),
}


@pytest.mark.parametrize("when", ["before the backward", "after the backward"])
@pytest.mark.parametrize("name", LOOKS)
def test_whoever_looks_at_logits_finds_them(name: str, when: str) -> None:
    ours, model = pair()
    results = []
    for one in (ours, model):
        outputs = one(**batch(model))
        if when == "after the backward":
            outputs.loss.backward()
        results.append(LOOKS[name](outputs).detach().cpu())
        if when != "after the backward":
            outputs.loss.backward() if name not in ("in place", "before a change") else None
    assert torch.equal(*results)


def test_logits_are_shown_without_being_computed() -> None:
    ours, model = pair()
    found, expected = ours(**batch(model)).logits, model(**batch(model)).logits
    assert (found.shape, found.dtype, found.device, found.requires_grad, found.is_leaf, found.dim(), len(found)) == (
        (expected.shape, expected.dtype, expected.device, True, False, 3, 2)
    )
    assert found.grad_fn is not None
    assert is_deferred(found)


LOSSES = {
    "label smoothing of Trainer": lambda outputs, labels: LabelSmoother(0.1)(outputs, labels, shift_labels=True),
    "cross entropy with smoothing": lambda outputs, labels: F.cross_entropy(
        outputs.logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1, reduction="sum"
    ),
    "weighted words": lambda outputs, labels: F.cross_entropy(
        outputs.logits.flatten(0, 1), labels.flatten(), torch.linspace(0, 1, 100).npu()
    ),
    "multiplied in place": lambda outputs, labels: outputs.loss.mul_(2),
    "both": lambda outputs, labels: outputs.loss + outputs.logits.square().mean(),
    "a node with a gradient of its own": lambda outputs, labels: F.cross_entropy(
        Reversed.apply(outputs.logits).flatten(0, 1), labels.flatten()
    ),
}


class Reversed(torch.autograd.Function):
    """Gives logits on, and their gradient with another sign, as in adversarial training."""

    @staticmethod
    def forward(ctx, logits: Tensor) -> Tensor:
        return logits * 1

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return -2 * grad


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_others_get_their_gradients(name: str) -> None:
    ours, model = pair()
    given = batch(model)
    values = []
    for one in (ours, model):
        values.append(LOSSES[name](one(**given), given["labels"]))
        values[-1].backward()
    torch.testing.assert_close(*values, rtol=2**-18, atol=0)
    assert_same_gradients(ours, model)


class Entropy:
    """A loss that is no function."""

    def __call__(self, logits: Tensor, **_: Any) -> Tensor:
        return logits.logsumexp(-1).mean()


OWN_LOSSES = {
    "callable": (Entropy(), False),
    "smoothed": (smoothed_loss, True),
    "that of transformers": (ForCausalLMLoss, True),
}


@pytest.mark.parametrize("name", OWN_LOSSES)
def test_a_loss_function_that_somebody_set_is_called_and_the_report_says_what_it_means(name: str) -> None:
    loss, by_cross_entropy = OWN_LOSSES[name]
    ours, model = pair()
    ours.loss_function = model.loss_function = loss
    ours(**batch(model))  # which shows what it does with its logits
    assert head_row(ours).swapped == by_cross_entropy
    assert (head_row(ours).reason is None) == by_cross_entropy
    assert_same_step(ours, model, batch(model), by_cross_entropy)


def hooked(model: PreTrainedModel) -> None:
    model.lm_head.register_forward_hook(lambda module, args, output: output * 2)


def adapted(model: PreTrainedModel) -> None:
    torch.manual_seed(0)
    inject_adapter_in_model(LoraConfig(target_modules=["lm_head"], init_lora_weights=False), model)


def quantised(model: PreTrainedModel) -> None:
    quantize_(model, Int8WeightOnlyConfig(), lambda module, path: path == "lm_head")


@pytest.mark.parametrize(
    ("change", "reason"), [(hooked, "hooks"), (adapted, "peft.tuners.lora.layer.Linear"), (quantised, "Int8Tensor")]
)
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("when", ["before", "after"])
def test_heads_that_are_more_than_a_product_keep_their_forward(change: Any, reason: str, when: str) -> None:
    model, ours = (zoo.build("qwen3").to("npu").eval() for _ in range(2))
    if when == "after":
        kernels_ext_npu.kernelize(ours)
    change(ours)
    change(model)
    if when == "before":
        kernels_ext_npu.kernelize(ours)
        assert reason in str(head_row(ours).reason)
        assert not head_row(ours).swapped
    given = batch(model)
    found, expected = ours(**given), model(**given)
    torch.testing.assert_close(found.loss, expected.loss, rtol=2**-18, atol=0)
    assert torch.equal(found.logits, expected.logits)


def test_a_compiled_model_keeps_its_logits() -> None:
    torch.compiler.reset()
    ours, model = pair()
    given = batch(model)
    compiled = torch.compile(ours, backend="eager")
    outputs = compiled(**given)
    torch.testing.assert_close(outputs.loss, model(**given).loss, rtol=2**-18, atol=0)
