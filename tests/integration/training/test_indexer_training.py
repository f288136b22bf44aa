"""The loss of indexers in training, against a formula in float64 of what the plain model pays on the CPU."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainingArguments

import kernels_ext_npu
from kernels_ext_npu.catalogue import INDEXERS
from kernels_ext_npu.swaps.attention import mla_absorb
from tests.support.sparse_models import made

pytestmark = pytest.mark.usefixtures("registered")
NAMES = ["DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"]
TOLERANCE = 2**-13  # of the norm of a gradient: two layers in float32, and sums over 16 heads with relu and softmax
IDS = torch.randint(2, 90, (2, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[0, :3] = 0
INPUTS: dict[str, dict[str, Tensor]] = {
    "rows": {},
    "padded": {"attention_mask": MASK},
    "packed": {"position_ids": torch.cat((torch.arange(5), torch.arange(7))).expand(2, -1)},
}


@pytest.fixture
def always(monkeypatch) -> None:
    """Attend to latents of chosen keys wherever there are more keys."""
    monkeypatch.setattr(
        mla_absorb.Latents, "is_cheaper_for_chosen", lambda self, queries, count, gathered: count < self.nope.shape[2]
    )


def models(name: str, dense: bool = False, **sizes: int) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return a plain model, which chooses all keys if it is dense, and one with kernels; both in training."""
    model, ours = made(name, index_n_heads=16, index_topk=4, **sizes)
    for module in model.modules():
        if dense and hasattr(module, "index_topk"):
            module.index_topk = IDS.shape[1]
    model.config.use_cache = ours.config.use_cache = False  # the formula runs indexers again
    return model.train(), ours.train()


def on_npu(**inputs: Tensor) -> dict[str, Tensor]:
    return {name: value.npu() for name, value in inputs.items()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.cpu().double() for name, p in model.named_parameters() if p.grad is not None}


def as_double(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(as_double, value))
    return value.detach().double() if isinstance(value, Tensor) and value.is_floating_point() else value


def wanted(model: PreTrainedModel, **inputs: Tensor) -> tuple[float, float, dict[str, Tensor]]:
    """Return the plain model's loss and that of its indexers with all gradients of their sum.

    An indexer is made anew in float64 of what it got and chose in the model: its scores are those that its forward
    would choose among, and their target the weights that attention returned.
    """
    calls: list[tuple[nn.Module, tuple, dict, Tensor]] = []
    paid: list[Tensor] = []
    for module in model.modules():
        if isinstance(module._modules.get("indexer"), nn.Module):
            module.indexer.register_forward_hook(lambda *call: calls.append(call), with_kwargs=True)
            module.register_forward_hook(lambda module, args, output: paid.append(output[1]))
    main = model(**inputs).loss
    main.backward()
    names, found = {module: name for name, module in model.named_modules()}, gradients(model)
    counted = inputs.get("attention_mask", torch.ones_like(IDS)).double()
    scores: list[Tensor] = []
    total, topk, to_float = 0.0, Tensor.topk, Tensor.float
    for (indexer, args, kwargs, chosen), weights in zip(calls, paid):
        exact = copy.deepcopy(indexer).double()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "topk", lambda self, *a, **k: scores.append(self) or topk(self, *a, **k))
            patch.setattr(Tensor, "float", lambda self: self if self.dtype == torch.float64 else to_float(self))
            given = {name: as_double(value) for name, value in kwargs.items() if name != "past_key_values"}
            inspect.unwrap(type(indexer).forward)(exact, *map(as_double, args), **given)
        is_seen = (scores[-1] > -1e30) & torch.zeros_like(scores[-1], dtype=torch.bool).scatter(-1, chosen.long(), True)
        target = weights.detach().double().mean(1)
        log = scores[-1].masked_fill(~is_seen, -1e300).log_softmax(-1)
        each = nn.functional.kl_div(log, target, reduction="none").masked_fill(~is_seen, 0).sum(-1)
        loss = (each * counted).sum() / counted.sum()
        loss.backward()
        total += loss.item()
        found |= {f"{names[indexer]}.{name}": grad for name, grad in gradients(exact).items()}
    return main.item(), total, found


def assert_same(found: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    assert set(found) == set(truth)
    assert any(".indexer." in name for name in found)
    for name, gradient in truth.items():
        assert (found[name] - gradient).norm() <= TOLERANCE * gradient.norm() + 1e-9, name


@pytest.mark.parametrize("dense", [False, True], ids=["chosen", "dense"])
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("name", NAMES)
def test_loss_and_all_gradients_are_those_of_the_formula(request, name: str, inputs: str, dense: bool) -> None:
    """Of indexers by the divergence, of all others by the model's own loss alone."""
    if name == NAMES[1]:  # one type attends to latents, the other to expanded keys
        request.getfixturevalue("always")
    model, ours = models(name, dense)
    labels = IDS.clone()
    labels[0, :4] = -100  # what padding attends to, and hence predicts, is the implementation's
    given = {"input_ids": IDS, "labels": labels, **INPUTS[inputs]}
    main, divergence, truth = wanted(model, **given)
    training = kernels_ext_npu.train_indexer(ours, coefficient=1.0, dense=dense)
    loss = ours(**on_npu(**given)).loss
    loss.backward()
    assert training.loss.item() == pytest.approx(divergence, rel=2**-14)  # of float32, as the gradients
    assert loss.item() == pytest.approx(main + divergence, rel=2**-16)
    assert_same(gradients(ours), truth)


def test_long_rows_are_compared_in_parts_and_a_loop_adds_the_loss_itself(monkeypatch, always) -> None:
    monkeypatch.setattr("kernels_ext_npu.training.indexer_loss._AT_A_TIME", 5)
    for inputs in INPUTS.values():
        model, ours = models(NAMES[0])
        _, divergence, truth = wanted(model, input_ids=IDS, labels=IDS, **inputs)
        training = kernels_ext_npu.train_indexer(ours)
        ours(**on_npu(input_ids=IDS, **inputs))
        training.loss.backward()
        assert training.loss.item() == pytest.approx(divergence, rel=2**-14)
        assert_same(gradients(ours), {name: each for name, each in truth.items() if ".indexer." in name})


def test_a_coefficient_multiplies_loss_and_gradients_of_indexers_alone() -> None:
    found = []
    for coefficient in (1.0, 0.25):
        torch.manual_seed(0)
        _, ours = models(NAMES[0])
        training = kernels_ext_npu.train_indexer(ours, coefficient)
        loss = ours(**on_npu(input_ids=IDS, labels=IDS)).loss
        loss.backward()
        found.append((loss.item() - coefficient * training.loss.item(), gradients(ours)))
    assert found[0][0] == pytest.approx(found[1][0], rel=2**-20)
    for name, gradient in found[0][1].items():
        factor = 0.25 if ".indexer." in name else 1.0
        torch.testing.assert_close(found[1][1][name], gradient * factor)


def test_layers_that_are_computed_again_count_once() -> None:
    found = []
    for kwargs in (None, {"use_reentrant": False}):
        torch.manual_seed(0)
        _, ours = models(NAMES[0])
        if kwargs is not None:
            ours.gradient_checkpointing_enable(kwargs)
        training = kernels_ext_npu.train_indexer(ours)
        loss = ours(**on_npu(input_ids=IDS, labels=IDS)).loss
        loss.backward()
        found.append((loss.item(), training.loss.item(), gradients(ours)))
    assert found[0][:2] == found[1][:2]
    assert all(torch.equal(found[1][2][name], gradient) for name, gradient in found[0][2].items())


def test_where_the_loss_would_be_lost_a_forward_is_refused() -> None:
    _, ours = models(NAMES[0], num_hidden_layers=1)
    training = kernels_ext_npu.train_indexer(ours)
    with pytest.raises(RuntimeError, match="was called for was not"):
        ours.model(IDS.npu())
    ours.gradient_checkpointing_enable({"use_reentrant": True})
    ours.enable_input_require_grads()
    with pytest.raises(RuntimeError, match="use_reentrant"):
        ours(**on_npu(input_ids=IDS, labels=IDS))
    ours.gradient_checkpointing_disable()
    with pytest.raises(RuntimeError, match="computed no indexer"):
        torch.compile(ours, backend="eager")(**on_npu(input_ids=IDS, labels=IDS))
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="computed no indexer"):
        ours(**on_npu(input_ids=IDS, labels=IDS), output_attentions=True)
    with pytest.raises(RuntimeError, match="computed no indexer"):
        ours.cpu()(input_ids=IDS, labels=IDS)
    training.remove()
    ours(input_ids=IDS, labels=IDS)


def test_evaluation_and_what_comes_after_it_are_as_before() -> None:
    _, ours = models(NAMES[0])
    given = on_npu(input_ids=IDS, labels=IDS)

    def outside() -> list[Tensor]:
        """Without gradients attention takes other paths than with them, so each is compared with itself."""
        with torch.no_grad():
            found = [ours.train()(**given).loss, ours.eval()(**given).loss]
        return [*found, ours(**given).loss]

    before, plain = outside(), ours.train()(**given).loss
    training = kernels_ext_npu.train_indexer(ours)
    assert ours.train()(**given).loss > plain
    assert outside() == before
    assert training.loss is None
    training.remove()
    loss = ours.train()(**given).loss
    assert loss == plain
    loss.backward()
    assert not any(".indexer." in name for name in gradients(ours))


@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_trains_its_own_indexers(way: Callable) -> None:
    _, ours = models(NAMES[0])
    training = kernels_ext_npu.train_indexer(ours)
    ours(input_ids=IDS.npu())
    other = way(ours)
    assert training.loss is not None
    loss = ours(**on_npu(input_ids=IDS, labels=IDS)).loss
    found = other(**on_npu(input_ids=IDS, labels=IDS)).loss
    torch.testing.assert_close(found, loss, rtol=1e-6, atol=0)  # sums of float32 over weights that lie elsewhere
    training.remove()
    assert ours(**on_npu(input_ids=IDS, labels=IDS)).loss < other(**on_npu(input_ids=IDS, labels=IDS)).loss
    found.backward()
    assert any(".indexer." in name for name in gradients(other))
    kernels_ext_npu.restore(other)
    assert other(**on_npu(input_ids=IDS, labels=IDS)).loss < found


def test_it_begins_where_the_kernel_computes_indexers_and_ends_with_restore() -> None:
    _, ours = models(NAMES[0])
    kernels_ext_npu.train_indexer(ours, coefficient=0.25)
    reasons = {row.reason for row in kernels_ext_npu.report(ours) if row.kind == INDEXERS.in_models}
    assert reasons == {"trained by the loss of train_indexer(), times 0.25"}
    with pytest.raises(ValueError, match="trained already"):
        kernels_ext_npu.train_indexer(ours)
    kernels_ext_npu.restore(ours)
    ours(**on_npu(input_ids=IDS, labels=IDS)).loss.backward()
    assert not any(".indexer." in name for name in gradients(ours))
    for other in (ours, nn.Linear(2, 2).npu()):
        with pytest.raises(ValueError, match="computes no indexer"):
            kernels_ext_npu.train_indexer(other)
    kernels_ext_npu.kernelize(ours)
    assert {row.reason for row in kernels_ext_npu.report(ours) if row.kind == INDEXERS.in_models} == {None}


@pytest.mark.parametrize(("name", "forwards"), [(NAMES[0], 1), (NAMES[1], 2)])
def test_a_trainer_adds_it_in_each_step_and_trains_indexers(tmp_path, name: str, forwards: int) -> None:
    """A step of two forwards adds the share of each. Indexers alone are trained, so that the model's loss stays."""
    model, ours = models(name, dense=True)
    main, divergence, _ = wanted(model, input_ids=IDS, labels=IDS)
    for parameter_name, parameter in ours.named_parameters():
        parameter.requires_grad_(".indexer." in parameter_name)
    kernels_ext_npu.train_indexer(ours, dense=True)
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2 // forwards,
        gradient_accumulation_steps=forwards,
        max_steps=6,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        gradient_checkpointing=True,
    )
    trainer = Trainer(model=ours, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in IDS])
    trainer.train()
    losses = [entry["loss"] - main for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 6
    assert losses[0] == pytest.approx(divergence, abs=1e-4)  # logged with four digits
    assert 0 < losses[-1] < 0.9 * losses[0]
