"""Heads that defer their logits: losses and gradients of whole models, and logits for everybody who looks at them."""

import copy
import inspect
import io
import pickle
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.trainer_pt_utils import LabelSmoother, nested_detach

import kernels_ext_npu
from kernels_ext_npu.catalogue import REPOSITORIES
from kernels_ext_npu.swaps.loss.deferred_logits import DeferredLogits
from tests.support import zoo

# tied and untied heads, a softcap, scales, tanh, biases, a model with pictures, one inside another
FEW = ("qwen3", "gemma2", "cohere", "granite", "nanochat", "gptj", "qwen2_vl", "bart", "llama4")
# models that do more to their logits than the kernel knows, or call their head in another forward
LOOKED_AT = {"qwen2_audio"}
OTHERWISE = {"albert", "bert", "deberta-v2", "nomic_bert", "roberta", "t5gemma"}


def has_head(name: str) -> bool:
    cls = getattr(transformers, zoo.ARCHITECTURES[name].model_class)
    return "labels" in inspect.signature(cls.forward).parameters and name not in {"distilbert", "hubert", "wav2vec2"}


ALL = [n if n in FEW else pytest.param(n, marks=pytest.mark.long) for n in zoo.ARCHITECTURES if has_head(n)]


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    kernels_ext_npu.register(kernels=["CrossEntropy"])
    yield
    kernels_ext_npu.unregister()


def pair(name: str = "qwen3", dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model without dropout, and the same with the kernel."""
    model = zoo.build(name, dtype).to("npu").eval()
    return model, kernels_ext_npu.kernelize(copy.deepcopy(model))


def batch(name: str, model: PreTrainedModel) -> dict[str, Tensor]:
    inputs = {key: value.npu() for key, value in zoo.inputs(name, model).items()}
    labels = inputs["decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"].clone()
    labels[:, :2] = -100
    return inputs | {"labels": labels}


def head_row(model: nn.Module) -> kernels_ext_npu.Row:
    (row,) = [row for row in kernels_ext_npu.report(model) if row.kind == "heads"]
    return row


def is_deferred(logits: Tensor) -> bool:
    return isinstance(logits, DeferredLogits) and logits.known is None


def assert_same_gradients(ours: nn.Module, model: nn.Module) -> None:
    """Sums of float32 in another order: 2^-17 of the largest gradient of the model."""
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    largest = max(float(grad.abs().max()) for grad in expected.values() if grad is not None)
    for name, parameter in ours.named_parameters():
        assert (parameter.grad is None) == (expected[name] is None), name
        if parameter.grad is not None:
            assert float((parameter.grad - expected[name]).abs().max()) <= 2**-17 * largest, name


@pytest.mark.parametrize("name", ALL)
def test_loss_gradients_and_logits_are_those_of_the_model(name: str) -> None:
    """Logits to the bit: they are computed by the lines of the model. The loss to the rounding of sums in float32."""
    model, ours = pair(name)
    given = batch(name, model)
    found, expected = ours(**given), model(**given)
    assert is_deferred(found.logits) == (name not in LOOKED_AT | OTHERWISE)
    row = head_row(ours)
    assert row.swapped == (name not in OTHERWISE)
    assert (row.reason is not None) == (name in LOOKED_AT or not row.swapped)
    found.loss.backward()
    expected.loss.backward()
    torch.testing.assert_close(found.loss, expected.loss, rtol=2**-18, atol=0)
    assert_same_gradients(ours, model)
    assert torch.equal(found.logits, expected.logits)
    assert found.logits.dtype == expected.logits.dtype


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_tied_and_untied_heads_get_all_of_their_gradient(name: str, tied: bool) -> None:
    model = zoo.build(name)
    model.config.tie_word_embeddings = tied
    model = type(model)(model.config).to("npu").eval()
    ours = kernels_ext_npu.kernelize(copy.deepcopy(model))
    assert (ours.get_output_embeddings().weight is ours.get_input_embeddings().weight) == tied
    given = batch(name, model)
    for one in (ours, model):
        for _ in range(2):  # they add up
            one(**given).loss.backward()
    assert_same_gradients(ours, model)


@pytest.mark.parametrize(
    "change",
    [
        {"num_items_in_batch": 5},
        {"num_items_in_batch": torch.tensor(7)},
        {"shift_labels": True},
        {"labels": -100},
        {"logits_to_keep": 4},
    ],
    ids=str,
)
def test_arguments_of_the_loss(change: dict[str, Any]) -> None:
    model, ours = pair()
    given = batch("qwen3", model)
    if change == {"shift_labels": True}:
        given["shift_labels"] = F.pad(given["labels"][:, 1:], (0, 1), value=-100)
    elif change == {"labels": -100}:
        given["labels"] = torch.full_like(given["labels"], -100)
    elif "logits_to_keep" in change:
        given |= change
        given["labels"] = given["labels"][:, -4:]
    else:
        given |= {key: value.npu() if isinstance(value, Tensor) else value for key, value in change.items()}
    found, expected = ours(**given), model(**given)
    assert is_deferred(found.logits)
    torch.testing.assert_close(found.loss, expected.loss, rtol=2**-18, atol=0, equal_nan=True)
    found.loss.backward()
    expected.loss.backward()
    assert_same_gradients(ours, model)


def before_a_change(outputs: Any) -> Tensor:
    """Made of logits that are changed in place before anybody looks at it."""
    halves = outputs.logits / 2
    outputs.logits.mul_(3)
    return halves


LOOKS = {
    "before a change": before_a_change,
    "argmax": lambda outputs: outputs.logits.argmax(-1),
    "by name": lambda outputs: outputs["logits"] + 0,
    "by number": lambda outputs: outputs[1] + 0,
    "as a tuple": lambda outputs: outputs.to_tuple()[1] * 1,
    "detached, as Trainer does": lambda outputs: nested_detach(outputs.logits),
    "on the host": lambda outputs: outputs.logits.cpu(),
    "numpy": lambda outputs: torch.from_numpy(outputs.logits.detach().cpu().numpy()),
    "pickled": lambda outputs: pickle.loads(pickle.dumps(outputs.logits.detach())),
    "saved": lambda outputs: saved(outputs.logits.detach()),
    "in place": lambda outputs: outputs.logits.div_(2).clone(),
    "last words": lambda outputs: outputs.logits[..., -3:],
    "by rows": lambda outputs: torch.stack(list(outputs.logits[:, -1])),
    "entropy": lambda outputs: torch.distributions.Categorical(logits=outputs.logits).entropy(),
    "listed": lambda outputs: torch.tensor(outputs.logits[0, 0].tolist()),
    "float": lambda outputs: outputs.logits.float().exp(),
    "scaled, capped, viewed": lambda outputs: (torch.tanh(outputs.logits / 3) * 3).view(-1, 100).sum(0),
}


def saved(logits: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(logits, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("when", ["before the backward", "after the backward"])
@pytest.mark.parametrize("name", LOOKS)
def test_whoever_looks_at_logits_finds_them(name: str, when: str) -> None:
    model, ours = pair()
    results = []
    for one in (ours, model):
        outputs = one(**batch("qwen3", model))
        if when == "after the backward":
            outputs.loss.backward()
        results.append(LOOKS[name](outputs).detach().cpu())
        if when != "after the backward":
            outputs.loss.backward() if name not in ("in place", "before a change") else None
    assert torch.equal(*results)


def test_logits_are_shown_without_being_computed() -> None:
    model, ours = pair()
    found, expected = ours(**batch("qwen3", model)).logits, model(**batch("qwen3", model)).logits
    assert (found.shape, found.dtype, found.device, found.requires_grad, found.is_leaf, found.dim(), len(found)) == (
        (expected.shape, expected.dtype, expected.device, True, False, 3, 2)
    )
    assert found.grad_fn is not None
    assert is_deferred(found)


LOSSES = {
    "label smoothing of Trainer": lambda outputs, labels: LabelSmoother(0.1)(outputs, labels, shift_labels=True),
    "cross entropy by hand": lambda outputs, labels: F.cross_entropy(
        outputs.logits[:, :-1].reshape(-1, 100), labels[:, 1:].reshape(-1)
    ),
    "cross entropy with smoothing": lambda outputs, labels: F.cross_entropy(
        outputs.logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1, reduction="sum"
    ),
    "weighted words": lambda outputs, labels: F.cross_entropy(
        outputs.logits.flatten(0, 1), labels.flatten(), torch.linspace(0, 1, 100).npu()
    ),
    "distillation": lambda outputs, labels: F.kl_div(
        outputs.logits.log_softmax(-1), torch.full_like(outputs.logits, 0.01), reduction="batchmean"
    ),
    "both": lambda outputs, labels: outputs.loss + outputs.logits.square().mean(),
    "a node of autograd": lambda outputs, labels: Halved.apply(outputs.logits.float().view(-1, 100)).square().sum(),
    "a node with a gradient of its own": lambda outputs, labels: F.cross_entropy(
        Reversed.apply(outputs.logits).flatten(0, 1), labels.flatten()
    ),
}


class Halved(torch.autograd.Function):
    """Takes a tensor as it is, as losses in C++ and Triton do."""

    @staticmethod
    def forward(ctx, logits: Tensor) -> Tensor:
        return logits / 2

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad / 2


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
    model, ours = pair()
    given = batch("qwen3", model)
    values = []
    for one in (ours, model):
        values.append(LOSSES[name](one(**given), given["labels"]))
        values[-1].backward()
    torch.testing.assert_close(*values, rtol=2**-18, atol=0)
    assert_same_gradients(ours, model)


def squares(logits: Tensor, **_: Any) -> Tensor:
    return logits.float().square().mean()


def smoothed(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    return F.cross_entropy(logits.view(-1, vocab_size), labels.view(-1), label_smoothing=0.1)


def scaled(*args: Any, **options: Any) -> Tensor:
    return 2 * smoothed(*args, **options)


class Criterion(nn.Module):
    """A loss with cross entropy in it."""

    def __init__(self) -> None:
        super().__init__()
        self.entropy = nn.CrossEntropyLoss()

    def forward(self, logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
        return self.entropy(logits.view(-1, vocab_size), labels.view(-1))


class Entropy:
    """A loss that is no function."""

    def __call__(self, logits: Tensor, **_: Any) -> Tensor:
        return logits.logsumexp(-1).mean()


OWN_LOSSES = {
    "squares": (squares, False),
    "a lambda": (lambda logits, **_: logits.float().exp().mean(), False),
    "callable": (Entropy(), False),
    "smoothed": (smoothed, True),
    "a partial": (partial(scaled), True),
    "a module": (Criterion(), True),
    "that of transformers": (ForCausalLMLoss, True),
}


@pytest.mark.parametrize("name", OWN_LOSSES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_loss_function_that_somebody_set_is_called_and_the_report_says_what_it_means(name: str, when: str) -> None:
    loss, by_cross_entropy = OWN_LOSSES[name]
    model = zoo.build("qwen3").to("npu").eval()
    ours = copy.deepcopy(model)
    if when == "after":
        kernels_ext_npu.kernelize(ours)
    for one in (model, ours):
        one.loss_function = loss
    if when == "before":
        kernels_ext_npu.kernelize(ours)
    given = batch("qwen3", model)
    found, expected = ours(**given), model(**given)
    assert is_deferred(found.logits) == by_cross_entropy
    assert head_row(ours).swapped == by_cross_entropy
    assert (head_row(ours).reason is None) == by_cross_entropy
    torch.testing.assert_close(found.loss, expected.loss, rtol=2**-18, atol=0)
    found.loss.backward()
    expected.loss.backward()
    assert_same_gradients(ours, model)


def test_a_loss_that_a_trainer_multiplies_in_place_is_an_ordinary_one() -> None:
    model, ours = pair()
    losses = []
    for one in (ours, model):
        losses.append(one(**batch("qwen3", one)).loss)
        losses[-1].mul_(2).backward()
    torch.testing.assert_close(*losses, rtol=2**-18, atol=0)
    assert_same_gradients(ours, model)


def test_models_without_labels_and_generation_are_untouched() -> None:
    model, ours = pair()
    given = batch("qwen3", model)
    del given["labels"]
    assert type(ours(**given).logits) is Tensor
    options = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(ours.generate(**given, **options), model.generate(**given, **options))


def test_autocast_and_no_grad() -> None:
    model, ours = pair()
    given = batch("qwen3", model)
    with torch.autocast("npu", torch.bfloat16):
        found, expected = ours(**given), model(**given)
    found.loss.backward()
    expected.loss.backward()
    torch.testing.assert_close(found.loss, expected.loss, rtol=2**-18, atol=0)
    assert found.logits.dtype == expected.logits.dtype == torch.bfloat16
    assert torch.equal(found.logits, expected.logits)
    with torch.no_grad():
        found, expected = ours(**given), model(**given)
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(found.logits, expected.logits)
    assert type(found.logits) is Tensor


class Adapter(nn.Linear):
    """A head of somebody else."""


class Doubled(nn.Linear):
    """A head that does more than multiply."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def other_head(model: PreTrainedModel) -> None:
    head = Adapter(64, 100, bias=False)
    head.weight = model.lm_head.weight
    model.lm_head = head


def hooked(model: PreTrainedModel) -> None:
    model.lm_head.register_forward_hook(lambda module, args, output: output * 2)


def wrapped(model: PreTrainedModel) -> None:
    original = model.lm_head.forward
    model.lm_head.forward = lambda *args: original(*args) * 2


def adapted(model: PreTrainedModel) -> None:
    torch.manual_seed(0)
    inject_adapter_in_model(LoraConfig(target_modules=["lm_head"], init_lora_weights=False), model)


def given_a_class(model: PreTrainedModel) -> None:
    model.lm_head.__class__ = Doubled


def quantised(model: PreTrainedModel) -> None:
    quantize_(model, Int8WeightOnlyConfig(), lambda module, path: path == "lm_head")


CHANGES = [
    (other_head, "Adapter"),
    (given_a_class, "Doubled"),
    (hooked, "hooks"),
    (wrapped, "another library has wrapped"),
    (adapted, "peft.tuners.lora.layer.Linear"),
    (quantised, "Int8Tensor"),
]


@pytest.mark.parametrize(("change", "reason"), CHANGES)
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("when", ["before", "after"])
def test_heads_that_are_more_than_a_product_keep_their_forward(change: Any, reason: str, when: str) -> None:
    model = zoo.build("qwen3").to("npu").eval()
    ours = copy.deepcopy(model)
    if when == "after":
        kernels_ext_npu.kernelize(ours)
    change(ours)
    change(model)
    if when == "before" or change is wrapped:
        kernels_ext_npu.kernelize(ours)
    if when == "before":
        assert reason in str(head_row(ours).reason)
        assert not head_row(ours).swapped
    given = batch("qwen3", model)
    found, expected = ours(**given), model(**given)
    torch.testing.assert_close(found.loss, expected.loss, rtol=2**-18, atol=0)
    assert torch.equal(found.logits, expected.logits)


def test_it_can_be_left_out_taken_out_and_put_in_again() -> None:
    model, ours = pair()
    given = batch("qwen3", model)
    assert head_row(ours).swapped
    kernels_ext_npu.restore(ours)
    assert "forward" not in vars(ours.lm_head)
    assert type(ours(**given).logits) is Tensor
    assert "kernelize(model)" in str(head_row(ours).reason)
    ours.train()
    ours.eval()
    assert not head_row(ours).swapped
    kernels_ext_npu.kernelize(ours)
    ours.train()
    assert is_deferred(ours(**given).logits)
    kernels_ext_npu.register(kernels=sorted(set(REPOSITORIES) - {"CrossEntropy"}))
    kernels_ext_npu.kernelize(ours)
    assert type(ours(**given).logits) is Tensor
    assert "leaves CrossEntropy out" in str(head_row(ours).reason)


def test_a_swapped_model_works_after_unregister_and_its_copies_are_their_own() -> None:
    model, ours = pair()
    given = batch("qwen3", model)
    kernels_ext_npu.unregister()
    clone = copy.deepcopy(ours)
    with torch.no_grad():
        clone.lm_head.weight.mul_(2)
    expected = model(**given)
    assert torch.equal(ours(**given).logits, expected.logits)
    assert torch.equal(clone(**given).logits, expected.logits * 2)
    assert type(pickle.loads(pickle.dumps(ours.lm_head))(torch.ones(64).npu())) is Tensor


def test_a_compiled_model_keeps_its_logits() -> None:
    torch.compiler.reset()
    model, ours = pair()
    given = batch("qwen3", model)
    compiled = torch.compile(ours, backend="eager")
    outputs = compiled(**given)
    torch.testing.assert_close(outputs.loss, model(**given).loss, rtol=2**-18, atol=0)
