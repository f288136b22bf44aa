"""Outputs that somebody holds: their logits are what the forward computed, whatever happens to the model afterwards."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, EncoderDecoderConfig, EncoderDecoderModel, GPT2Config, PreTrainedModel

import kernels_ext_npu
from kernels_ext_npu.swaps.loss.deferred_logits import DeferredLogits
from tests.support import zoo

TOLERANCE = 2**-16  # of the largest logit: sums of float32 in another order, over two layers
Batch = dict[str, Tensor]
Act = Callable[[PreTrainedModel, Batch], Any]


@pytest.fixture(autouse=True)
def _registered() -> None:
    kernels_ext_npu.register(kernels=["CrossEntropy"])


def pair(name: str = "qwen3") -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model with the kernel, and the plain one on the CPU; without dropout."""
    model = zoo.build(name).eval()
    return kernels_ext_npu.kernelize(copy.deepcopy(model).to("npu")), model


def batch(model: PreTrainedModel, seed: int = 0) -> Batch:
    ids = torch.randint(2, 90, (2, 9), generator=torch.Generator().manual_seed(seed)).to(model.device)
    return {"input_ids": ids, "labels": ids}


def assert_close(found: Tensor, expected: Tensor) -> None:
    found, expected = found.detach().cpu(), expected.detach()
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE * float(expected.abs().max()))


def assert_same_gradients(ours: PreTrainedModel, model: PreTrainedModel) -> None:
    expected = {path: parameter.grad for path, parameter in model.named_parameters() if parameter.grad is not None}
    largest = max((float(grad.abs().max()) for grad in expected.values()), default=0)
    for path, parameter in ours.named_parameters():
        assert (parameter.grad is None) == (path not in expected), path
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad.cpu(), expected[path], rtol=0, atol=TOLERANCE * largest)


def backward(model: PreTrainedModel, given: Batch) -> Any:
    outputs = model(**given)
    outputs.loss.backward()
    return outputs


def step_with(optimizer: Any, model: PreTrainedModel, given: Batch) -> Any:
    made = optimizer(model.parameters())
    outputs = backward(model, given)
    made.step()
    return outputs


def written_to(write: Callable[[nn.Parameter], object], model: PreTrainedModel, given: Batch) -> Any:
    outputs = backward(model, given)
    with torch.no_grad():
        for parameter in model.parameters():
            write(parameter)
    return outputs


def collected(context: Any, model: PreTrainedModel, given: Batch) -> list[Any]:
    """Validation logits, collected while the model is trained."""
    optimizer, found = torch.optim.SGD(model.parameters(), 0.01), []
    for epoch in range(2):
        with context():
            found.append(model(**given))
        model(**batch(model, epoch + 1)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def earlier_call(model: PreTrainedModel, given: Batch) -> Any:
    """Held from a call whose own loss never runs backward."""
    held = model(**given)
    step_with(partial(torch.optim.SGD, lr=0.5), model, batch(model, 1))
    return held


def accumulated(model: PreTrainedModel, given: Batch) -> list[Any]:
    held = [model(**given), model(**batch(model, 1))]
    sum(outputs.loss for outputs in held).backward()
    torch.optim.SGD(model.parameters(), 0.5).step()
    return held


def moved(model: PreTrainedModel, given: Batch) -> Any:
    outputs = model(**given)
    model.to("cpu")
    return outputs


def moved_after_the_backward(model: PreTrainedModel, given: Batch) -> Any:
    outputs = backward(model, given)
    model.to("cpu")
    return outputs


def cast(model: PreTrainedModel, given: Batch) -> Any:
    outputs = model(**given)
    model.to(torch.bfloat16)
    return outputs


def loaded(model: PreTrainedModel, given: Batch) -> Any:
    outputs = backward(model, given)
    model.load_state_dict({name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()})
    return outputs


def frozen(model: PreTrainedModel, given: Batch) -> Any:
    outputs = model.requires_grad_(False)(**given)
    for parameter in model.parameters():
        parameter.data.mul_(2)
    return outputs


ACTS: dict[str, Act] = {
    "backward": backward,
    "step": partial(step_with, partial(torch.optim.SGD, lr=0.5)),
    "fused step": partial(step_with, partial(torch.optim.AdamW, lr=0.5, fused=True)),
    "weights -= gradients": partial(written_to, lambda p: p.data.sub_(0.5 * p.grad)),
    "data.mul_": partial(written_to, lambda p: p.data.mul_(3)),
    "data.copy_": partial(written_to, lambda p: p.data.copy_(torch.ones_like(p))),
    "data =": partial(written_to, lambda p: setattr(p, "data", p.data * 3)),
    "add_ under no_grad": partial(written_to, lambda p: p.add_(1)),
    "collected under no_grad": partial(collected, torch.no_grad),
    "collected in inference mode": partial(collected, torch.inference_mode),
    "collected with gradients": partial(collected, torch.enable_grad),
    "of an earlier call": earlier_call,
    "accumulated": accumulated,
    "moved": moved,
    "moved after the backward": moved_after_the_backward,
    "cast": cast,
    "loaded": loaded,
    "frozen": frozen,
}


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
@pytest.mark.parametrize("act", ACTS)
def test_logits_are_what_the_forward_computed(act: str, name: str) -> None:
    ours, model = pair(name)
    found, expected = (ACTS[act](one, batch(one)) for one in (ours, model))
    listed = isinstance(expected, list)
    for one, other in zip(found if listed else [found], expected if listed else [expected], strict=True):
        assert_close(one.logits, other.logits)


class Products(TorchDispatchMode):
    """Counts the results with so many elements, one for each token and word."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements, self.number = elements, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        is_view = function.is_view or "view" in str(function)
        self.number += isinstance(result, Tensor) and result.numel() == self.elements and not is_view
        return result


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_a_held_output_costs_its_logits_once_and_one_that_is_not_held_nothing(monkeypatch, name: str) -> None:
    """Beside the gradient of all logits, which is not kept here."""
    ours, _ = pair(name)
    monkeypatch.setattr(import_module(f"{kernels_ext_npu.load('CrossEntropy').__name__}.pieces"), "KEPT", 0)
    given, functions = batch(ours), {"qwen3": 1, "gemma2": 4}[name]  # gemma2: product, division, tanh, product

    def counted(hold: bool) -> int:
        with Products(2 * 9 * ours.config.vocab_size) as products:
            outputs = ours(**given)
            loss = outputs.loss
            if not hold:
                del outputs
            loss.backward()
        return products.number

    assert counted(False) == 0
    assert counted(True) == functions


def test_a_loss_that_looks_at_logits_costs_what_it_costs_without_the_kernel() -> None:
    """In bfloat16, where it casts them: the output that is held is not computed for itself."""
    model = zoo.build("qwen3", torch.bfloat16).eval().to("npu")
    model.loss_function = lambda logits, labels, **_: logits.float().square().mean()
    results = []
    for one in (kernels_ext_npu.kernelize(copy.deepcopy(model)), model):
        with Products(2 * 9 * model.config.vocab_size) as products:
            outputs = one(**batch(one))
            outputs.loss.backward()
        results.append((products.number, outputs.loss, outputs.logits.detach(), one.lm_head.weight.grad))
    (found, *ours), (expected, *others) = results
    assert found <= expected
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


def of_both(outputs: Any) -> Tensor:
    outputs.logits.argmax(-1)
    outputs.logits.retain_grad()
    (outputs.loss + outputs.logits.square().mean()).backward()
    return outputs.logits.grad


def of_a_view(outputs: Any) -> Tensor:
    """A tensor that somebody made of the logits, which are changed through it."""
    rows = outputs.logits.view(-1, outputs.logits.shape[-1])
    with torch.no_grad():
        rows[0] = 0
    return outputs.logits


def changed_in_place(outputs: Any) -> Tensor:
    logits = outputs.logits.div_(2)
    logits.retain_grad()
    (logits.square().sum() + outputs.loss).backward()
    return logits.grad


def hooked_and_changed_in_place(outputs: Any) -> Tensor:
    seen: list[Tensor] = []
    outputs.logits.register_hook(seen.append)
    outputs.logits.mul_(2)
    outputs.loss.backward()
    return seen[0]


def derived(outputs: Any) -> Tensor:
    (found,) = torch.autograd.grad(outputs.loss, outputs.logits, create_graph=True)
    return torch.autograd.grad(found.square().sum(), outputs.logits)[0]


def derived_by_weights(outputs: Any) -> Tensor:
    (found,) = torch.autograd.grad(outputs.loss, outputs.logits, create_graph=True)
    found.square().sum().backward()
    return found


ASKS = [
    retained, hooked_and_let_go, of_both, of_a_view, changed_in_place, hooked_and_changed_in_place, derived,
    derived_by_weights,
]  # fmt: skip


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "granite", "cohere", "gptj"])
@pytest.mark.parametrize("ask", ASKS)
def test_gradients_of_logits_are_ordinary_ones(ask: Callable[[Any], Tensor], name: str) -> None:
    """Those of weights, too, where the act leaves some."""
    ours, model = pair(name)
    assert_close(*(ask(one(**batch(one))) for one in (ours, model)))
    assert_same_gradients(ours, model)


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
    ours, model = pair(name)
    found, expected = (SAVED[how](one, batch(one)) for one in (ours, model))
    assert_close(found, expected)
    found.backward()
    expected.backward()
    assert_same_gradients(ours, model)


def test_the_report_says_that_a_held_output_was_computed() -> None:
    ours, _ = pair()

    def reason() -> str | None:
        (row,) = [row for row in kernels_ext_npu.report(ours) if row.kind == "heads"]
        assert row.swapped
        return row.reason

    ours(**batch(ours)).loss.backward()
    assert reason() is None
    outputs = ours(**batch(ours))
    assert isinstance(outputs.logits, DeferredLogits)
    outputs.loss.backward()
    assert "the output was still held when the backward began" in str(reason())


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
