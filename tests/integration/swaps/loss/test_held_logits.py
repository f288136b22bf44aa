"""Outputs that somebody holds: their logits are what the forward computed, whatever happens to the model afterwards."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, EncoderDecoderConfig, EncoderDecoderModel, GPT2Config, PreTrainedModel

import kernels_ext_npu
from kernels_ext_npu.measuring.costs import Cost
from kernels_ext_npu.swaps.loss.deferred_logits import DeferredLogits
from tests.integration.swaps.loss.heads import assert_same_gradients, head_row, pair
from tests.support import zoo

TOLERANCE = 2**-16  # of the largest logit: sums of float32 in another order, over two layers
Batch = dict[str, Tensor]


def batch(model: PreTrainedModel, seed: int = 0) -> Batch:
    ids = torch.randint(2, 90, (2, 9), generator=torch.Generator().manual_seed(seed)).to(model.device)
    return {"input_ids": ids, "labels": ids}


def assert_close(found: Tensor, expected: Tensor) -> None:
    found, expected = found.detach().cpu(), expected.detach()
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE * float(expected.abs().max()))


@pytest.mark.parametrize(("name", "functions"), [("qwen3", 1), ("gemma2", 4)])
def test_a_held_output_costs_its_logits_once(name: str, functions: int) -> None:
    """A product; in Gemma 2 a division, a tanh and a product more."""
    ours, _ = pair(name)
    costs = []
    for is_held in (True, False):
        with Cost() as cost:
            outputs = ours(**batch(ours))
            loss = outputs.loss
            if not is_held:
                del outputs
            loss.backward()
        ours.zero_grad()
        costs.append(cost.launches)
    assert (costs[0] - costs[1]).total() == functions


def test_a_loss_that_looks_at_logits_costs_what_it_costs_without_the_kernel() -> None:
    """In bfloat16, where it casts them: the output that is held is not computed for itself."""
    model = zoo.build("qwen3", torch.bfloat16).eval().to("npu")
    model.loss_function = lambda logits, labels, **_: logits.float().square().mean()
    results = []
    for one in (kernels_ext_npu.kernelize(copy.deepcopy(model)), model):
        with Cost() as cost:
            outputs = one(**batch(one))
            outputs.loss.backward()
        results.append((cost.launches, outputs.loss, outputs.logits.detach(), one.lm_head.weight.grad))
    (found, *ours), (expected, *others) = results
    assert found - expected == {"matmul": 2}  # in the place of one matmul_backward
    for one, other in zip(ours, others, strict=True):
        assert torch.equal(one, other)


def retained(outputs: Any) -> Tensor:
    outputs.logits.retain_grad()
    outputs.loss.backward()
    return outputs.logits.grad


def hooked_and_let_go(outputs: Any) -> Tensor:
    seen: list[Tensor] = []
    loss = outputs.loss
    outputs.logits.register_hook(seen.append)
    outputs.clear()
    loss.backward()
    return seen[0]


def through_a_view(outputs: Any) -> Tensor:
    """A tensor that somebody made of the logits, which are changed through it."""
    rows = outputs.logits.view(-1, outputs.logits.shape[-1])
    with torch.no_grad():
        rows[0] = 0
    return outputs.logits


def hooked_and_changed_in_place(outputs: Any) -> Tensor:
    seen: list[Tensor] = []
    outputs.logits.register_hook(seen.append)
    outputs.logits.mul_(2)
    outputs.loss.backward()
    return seen[0]


def derived_by_weights(outputs: Any) -> Tensor:
    (found,) = torch.autograd.grad(outputs.loss, outputs.logits, create_graph=True)
    found.square().sum().backward()
    return found


ASKS = [retained, hooked_and_let_go, through_a_view, hooked_and_changed_in_place, derived_by_weights]


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "granite", "cohere", "gptj"])
@pytest.mark.parametrize("ask", ASKS)
def test_gradients_of_logits_are_ordinary_ones(ask: Callable[[Any], Tensor], name: str) -> None:
    """Those of weights, too, where the act leaves some."""
    ours, model = pair(name, "cpu")
    assert_close(*(ask(one(**batch(one))) for one in (ours, model)))
    assert_same_gradients(ours, model, TOLERANCE)


def around_the_model(model: PreTrainedModel, given: Batch) -> Tensor:
    embedded = model.get_input_embeddings()(given["input_ids"])
    return checkpoint(lambda x: model(inputs_embeds=x, labels=given["labels"]).loss, embedded, use_reentrant=False)


def saved_by(hooks: Callable[[], AbstractContextManager], model: PreTrainedModel, given: Batch) -> Tensor:
    with hooks():
        return model(**given).loss


SAVED = {
    "on the host": partial(saved_by, save_on_cpu),
    "copied": partial(saved_by, partial(saved_tensors_hooks, Tensor.clone, lambda tensor: tensor)),
    "computed again": around_the_model,
}


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "granite", "cohere", "gptj"])
@pytest.mark.parametrize("how", SAVED)
def test_hooks_may_look_at_what_is_kept_for_the_backward(how: str, name: str) -> None:
    """They compute logits in the middle of the forward, between two of its steps."""
    ours, model = pair(name, "cpu")
    found, expected = (SAVED[how](one, batch(one)) for one in (ours, model))
    assert_close(found, expected)
    found.backward()
    expected.backward()
    assert_same_gradients(ours, model, TOLERANCE)


def test_the_report_says_that_a_held_output_was_computed() -> None:
    ours, _ = pair()

    ours(**batch(ours)).loss.backward()
    assert (head_row(ours).swapped, head_row(ours).reason) == (True, None)
    outputs = ours(**batch(ours))
    assert isinstance(outputs.logits, DeferredLogits)
    outputs.loss.backward()
    assert head_row(ours).swapped
    assert "the output was still held when the backward began" in str(head_row(ours).reason)


def test_logits_of_a_decoder_inside_another_model_are_ordinary_ones() -> None:
    """The loss of an EncoderDecoderModel is not that of its decoder, which is called without labels."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    encoder = BertConfig(vocab_size=100, **sizes)
    decoder = GPT2Config(vocab_size=100, n_embd=32, n_layer=1, n_head=2, add_cross_attention=True)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    torch.manual_seed(0)
    model = EncoderDecoderModel(config).eval()
    ours = kernels_ext_npu.kernelize(copy.deepcopy(model).to("npu"))
    results = []
    for one in (ours, model):
        outputs = one(**batch(one))
        given = [outputs.logits, one.decoder.lm_head.weight]
        results.append([outputs.loss, *torch.autograd.grad(outputs.loss, given), outputs.logits])
    for found, expected in zip(*results, strict=True):
        assert_close(found, expected)
    assert isinstance(results[0][-1], DeferredLogits)
