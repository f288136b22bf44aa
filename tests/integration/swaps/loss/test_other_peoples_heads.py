"""Heads of models that nobody derived from transformers' and whose forward computes the loss: as nanoGPT has it."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kernels_ext_npu
from kernels_ext_npu.catalogue import HEADS
from kernels_ext_npu.swaps.loss.steps import Product
from tests.integration.swaps.loss.heads import assert_same_gradients, head_row, is_deferred
from tests.integration.swaps.loss.models_of_own_code import (
    MODELS,
    WIDTH,
    WORDS,
    Body,
    Model,
    NanoGPT,
    batch,
    cross_entropy,
)
from tests.support import served

TOLERANCE = 2**-18  # of losses: sums of float32 in another order


def pair(cls: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = cls()
    return kernels_ext_npu.kernelize(copy.deepcopy(model).to("npu")), model


def step(model: nn.Module, *given: Tensor) -> Tensor:
    """Return the loss of a step, whose logits nobody keeps."""
    device = next(model.parameters()).device
    result = model(*(each.to(device) for each in given))
    loss = result[-1] if isinstance(result, tuple) else result
    del result
    loss.backward()
    return loss.detach().cpu()


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_computed_without_logits(name: str, monkeypatch) -> None:
    losses = []
    take = Product.loss
    monkeypatch.setattr(Product, "loss", lambda *args, **options: losses.append(1) or take(*args, **options))
    ours, model = pair(MODELS[name])
    rows = served.rows(ours, HEADS.in_models)
    assert all(row.swapped for row in rows)
    assert len(rows) == (2 if name == "Several" else 1)
    for _ in range(2):  # gradients add up
        torch.testing.assert_close(step(ours, *batch()), step(model, *batch()), rtol=TOLERANCE, atol=0)
        assert_same_gradients(ours, model)
    assert len(losses) == 2 * len(rows)
    assert [row.reason for row in served.rows(ours, HEADS.in_models)] == [None] * len(rows)  # nothing looked at them


def test_logits_that_somebody_keeps_are_those_of_the_model() -> None:
    ours, model = pair(NanoGPT)
    (found, loss), (expected, expected_loss) = ours(*(each.npu() for each in batch())), model(*batch())
    assert is_deferred(found)
    (loss + found.square().mean()).backward()
    (expected_loss + expected.square().mean()).backward()
    torch.testing.assert_close(found.detach().cpu(), expected.detach(), rtol=0, atol=TOLERANCE * 8)
    assert_same_gradients(ours, model)
    assert "looked at them" in str(head_row(ours).reason)


class Masked(Model):
    """Padding that is masked, also where there are no labels."""

    def forward(self, words: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        hidden = self.body(words)
        logits = self.lm_head(hidden if attention_mask is None else hidden * attention_mask.unsqueeze(-1))
        return logits, None if labels is None else cross_entropy(logits, labels)


@pytest.mark.parametrize(("cls", "is_masked"), [(NanoGPT, False), (Masked, False), (Masked, True)])
def test_without_labels_logits_are_ordinary_ones(cls: type[nn.Module], is_masked: bool) -> None:
    ours, _ = pair(cls)
    words = batch()[0].npu()
    logits, _ = ours(words, *[torch.ones_like(words)] * is_masked)
    assert type(logits) is Tensor


def test_labels_tell_where_a_forward_has_them() -> None:
    ours, _ = pair(Masked)
    words, targets = (each.npu() for each in batch())
    assert is_deferred(ours(words, labels=targets)[0])


class Weighted(Model):
    """A weight for each word of the vocabulary, which the kernel does not take."""

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        logits = self.lm_head(self.body(words)).flatten(0, 1)
        return F.cross_entropy(
            logits, targets.flatten(), torch.linspace(0, 1, WORDS, device=words.device), ignore_index=-1
        )


class Shuffled(Model):
    """Rows of the text for its columns, of which there are as many."""

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        logits = self.lm_head(self.body(words[:, :3])).permute(1, 2, 0)
        return F.cross_entropy(logits, targets[:, :3].t(), ignore_index=-1)


class Every(Model):
    """Every other word of the vocabulary."""

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.lm_head(self.body(words))[..., ::2], targets.clamp(-1, WORDS // 2 - 1))


class Flat(nn.Module):
    """Layers that widen and are no head, ahead of one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body()
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(3 * WIDTH, WORDS)

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        hidden = self.up(self.body(words))
        hidden += 1
        return cross_entropy(self.out(hidden.relu_() * hidden[..., :1].sigmoid()), targets)


class Gated(Flat):
    """Logits of which a gate of the last layer decides."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        hidden = self.body(words)
        return cross_entropy(self.out(self.up(hidden)) * self.gate(hidden).sigmoid(), targets)


def test_of_the_layers_that_widen_a_forward_calls_the_head_last() -> None:
    ours, model = pair(Flat)
    assert [row.path for row in served.rows(ours, HEADS.in_models)] == ["out"]
    torch.testing.assert_close(step(ours, *batch()), step(model, *batch()), rtol=TOLERANCE, atol=0)
    assert_same_gradients(ours, model)
    assert head_row(ours).reason is None


@pytest.mark.parametrize("cls", [Weighted, Shuffled, Every, Gated])
def test_what_the_kernel_does_not_compute_is_computed_from_logits(cls: type[nn.Module]) -> None:
    ours, model = pair(cls)
    torch.testing.assert_close(step(ours, *batch()), step(model, *batch()), rtol=TOLERANCE, atol=0)
    assert_same_gradients(ours, model)
    assert any("looked at them" in str(row.reason) for row in served.rows(ours, HEADS.in_models))


class Narrow(nn.Module):
    """A classifier, of which nothing is saved: its logits are fewer than what it makes them of."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.classifier(x), targets)


def test_a_head_with_fewer_words_than_features_is_none() -> None:
    assert served.rows(pair(Narrow)[0], HEADS.in_models) == []


class Bare(nn.Linear):
    """A linear layer that says nothing of its sizes."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias = nn.Parameter(torch.randn(WORDS, WIDTH)), None


class Strange(Narrow):
    def __init__(self) -> None:
        super().__init__()
        self.classifier = Bare()


def test_a_layer_without_sizes_is_left_alone() -> None:
    assert served.rows(pair(Strange)[0], HEADS.in_models) == []


def test_under_autocast_a_loss_is_float32_as_ever() -> None:
    ours, model = pair(NanoGPT)
    with torch.autocast("npu", torch.bfloat16):
        _, loss = ours(*(each.npu() for each in batch()))
    with torch.autocast("cpu", torch.bfloat16):
        _, expected = model(*batch())
    assert loss.dtype is expected.dtype is torch.float32
    torch.testing.assert_close(loss.cpu(), expected, rtol=2**-8, atol=0)  # logits of 16 bits


def test_a_head_that_becomes_another_keeps_its_forward() -> None:
    ours, _ = pair(NanoGPT)
    ours.lm_head.register_forward_hook(lambda module, args, output: output * 2)  # type: ignore[union-attr]
    logits, _ = ours(*(each.npu() for each in batch()))
    assert type(logits) is Tensor
    kernels_ext_npu.kernelize(ours)
    assert "hooks" in str(head_row(ours).reason)


def test_a_copy_and_a_pickled_model_compute_it_too() -> None:
    ours, model = pair(NanoGPT)
    expected = step(model, *batch())
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        torch.testing.assert_close(step(other, *batch()), expected, rtol=TOLERANCE, atol=0)


def test_restored_it_is_the_layer_that_it_was() -> None:
    ours, _ = pair(NanoGPT)
    kernels_ext_npu.restore(ours)
    assert type(ours(*(each.npu() for each in batch()))[0]) is Tensor
    assert "forward" not in vars(ours.lm_head)
