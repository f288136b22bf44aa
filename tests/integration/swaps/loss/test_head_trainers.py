"""Ten steps of a real Trainer with heads that defer their logits, beside the same steps without."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels import get_local_kernel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Trainer, TrainingArguments, set_seed

import kernels_ext_npu
from kernels_ext_npu.swaps.loss.steps import Product
from tests.support import checkpoints, pages, zoo

RECIPES = pages.read(pages.DOCS / "recipes.md")
ROOT = Path(__file__).resolve().parents[4]
ROWS = [
    {"input_ids": row, "labels": [-100, *row[1:]]}
    for row in ([2 + (7 * i + j) % 80 for j in range(9)] for i in range(40))
]
TOLERANCE = 1e-5  # of losses in float32, since AdamW divides by a root of squares
OPTIONS: dict[str, dict[str, Any]] = {
    "accumulation and clipping": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "bfloat16": {"bf16": True},
    "checkpointing": {"gradient_checkpointing": True},
}
LONG = {"bfloat16", "checkpointing"}


def train(model: PreTrainedModel, folder: Path, **options: Any) -> Trainer:
    set_seed(0)
    arguments = TrainingArguments(
        str(folder), max_steps=10, logging_steps=1, learning_rate=1e-3, optim="adamw_torch", save_strategy="no",
        report_to="none", disable_tqdm=True, per_device_train_batch_size=2, **options,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=ROWS, eval_dataset=ROWS[:4])
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in OPTIONS]
)
def test_ten_steps_are_those_without_the_kernel(name: str, tmp_path: Path, monkeypatch) -> None:
    """Losses to 1e-5 in float32, since AdamW divides by a root of squares; with bfloat16 to 2^-6, a few of its steps.

    Under autocast the product for the hidden states is rounded in another place.
    """
    losses = []
    take = Product.loss
    monkeypatch.setattr(Product, "loss", lambda *args, **options: losses.append(1) or take(*args, **options))
    model = zoo.build("qwen3").to("npu")
    ours = kernels_ext_npu.kernelize(copy.deepcopy(model))
    options = OPTIONS[name]
    found, expected = (train(one, tmp_path, **options) for one in (ours, model))
    steps = 10 * options.get("gradient_accumulation_steps", 1)
    assert len(losses) == (0 if "label_smoothing_factor" in options else steps)
    tolerance = 2**-6 if "bf16" in options else TOLERANCE
    for one, other in zip(found.state.log_history, expected.state.log_history):
        for key in {"loss", "grad_norm"} & one.keys():
            assert one[key] == pytest.approx(other[key], rel=tolerance), (one, other)
    assert found.evaluate()["eval_loss"] == pytest.approx(expected.evaluate()["eval_loss"], rel=tolerance)
    assert torch.isfinite(ours.lm_head.weight).all()


def completions(i: int) -> str:
    return f" w3 {'w4 ' * (i % 3)}w5"


def prefers_long_ones(completions: list[str], **_: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def chat(i: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"w1 w{i}"}, {"role": "assistant", "content": "w3 w5" + i % 3 * " w4"}]


# what each trainer of TRL takes: a row, and its options
TRL: dict[str, tuple[Callable[[int], dict[str, Any]], dict[str, Any]]] = {
    "SFT": (lambda i: {"prompt": "w1 w2", "completion": completions(i)}, {"max_length": 16}),
    "DPO": (lambda i: {"prompt": "w1 w2", "chosen": completions(i), "rejected": " w5 w6"}, {"max_length": 16}),
    "KTO": (lambda i: {"prompt": "w1 w2", "completion": completions(i), "label": i % 2 == 0}, {"max_length": 16}),
    "GRPO": (
        lambda i: {"prompt": f"w{i} w2"},
        {"num_generations": 2, "max_completion_length": 4, "beta": 0.1, "temperature": 0.7, "entropy_coef": 0.1},
    ),
    "Distillation": (lambda i: {"prompt": f"w{i} w2"}, {"max_completion_length": 4, "temperature": 0.7, "beta": 0.3}),
    "GKD": (lambda i: {"messages": chat(i)}, {"max_new_tokens": 4, "lmbda": 0.5, "beta": 0.3, "max_length": 32}),
}


@pytest.fixture
def model(tmp_path: Path) -> PreTrainedModel:
    checkpoints.save(tmp_path, "qwen3")
    return AutoModelForCausalLM.from_pretrained(tmp_path).to("npu")


def logged(name: str, trainer: type, model: PreTrainedModel, folder: Path) -> list[list[float]]:
    """Train three steps; return losses, entropies and norms of gradients."""
    import datasets
    import trl
    from trl.experimental import gkd

    row, options = TRL[name]
    more: dict[str, Any] = {"reward_funcs": prefers_long_ones} if name == "GRPO" else {}
    if name in ("Distillation", "GKD"):  # towards a model that is surer of itself
        more["teacher_model"] = copy.deepcopy(model)
        more["teacher_model"].lm_head.weight.data.mul_(3)
    arguments = getattr(gkd if name == "GKD" else trl, f"{name}Config")(
        str(folder / "output"), max_steps=3, logging_steps=1, report_to="none", disable_tqdm=True, save_strategy="no",
        per_device_train_batch_size=2, bf16=False, gradient_checkpointing=False, learning_rate=1e-3, **options,
    )  # fmt: skip
    set_seed(0)
    rows = datasets.Dataset.from_list([row(i) for i in range(8)])
    words = AutoTokenizer.from_pretrained(folder)
    made = trainer(copy.deepcopy(model), args=arguments, train_dataset=rows, processing_class=words, **more)
    made.train()
    steps = [entry for entry in made.state.log_history if "loss" in entry]
    assert len(steps) == 3
    return [[step[key] for key in ("loss", "grad_norm", "entropy") if key in step] for step in steps]


def record_calls(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[int]:
    """Count the calls of functions of the kernel."""
    kernel, calls = get_local_kernel(ROOT / "CrossEntropy"), []
    for name in names:
        take = getattr(kernel, name)
        monkeypatch.setattr(kernel, name, lambda *a, take=take, **options: calls.append(1) or take(*a, **options))
    assert kernels_ext_npu.load("CrossEntropy") is kernel
    return calls


@pytest.mark.parametrize("name", ["SFT", "DPO", "KTO", "GRPO"])
@pytest.mark.long
def test_steps_of_trl_are_those_without_the_kernel(name: str, model, tmp_path: Path, monkeypatch) -> None:
    """As they are, and with the log probabilities of the recipe."""
    trl, utils = pytest.importorskip("trl"), pytest.importorskip("trl.trainer.utils")
    trainer = getattr(trl, f"{name}Trainer")
    expected = [pytest.approx(step, rel=TOLERANCE) for step in logged(name, trainer, model, tmp_path)]
    ours = kernels_ext_npu.kernelize(model)
    assert logged(name, trainer, ours, tmp_path) == expected
    calls = record_calls(monkeypatch, "linear_log_probs", "linear_log_probs_and_entropy")
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", utils._ChunkedLogProbFunction)
    exec(RECIPES.code("Log probabilities without logits", before="bfloat16"), {})
    assert logged(name, trainer, ours, tmp_path) == expected
    assert len(calls) >= 3


@pytest.mark.parametrize("name", ["Distillation", "GKD"])
@pytest.mark.long
def test_steps_with_the_recipe_of_distillation_are_those_without(name: str, model, tmp_path: Path, monkeypatch) -> None:
    trl = pytest.importorskip("trl", minversion="1.16")
    from trl.experimental.gkd import GKDTrainer
    from trl.trainer import distillation_trainer

    kernels_ext_npu.unregister()
    plain = {"Distillation": trl.DistillationTrainer, "GKD": GKDTrainer}[name]
    expected = logged(name, plain, model, tmp_path)
    calls = record_calls(monkeypatch, "linear_generalized_jsd")
    replaced = "ChunkedDivergenceFunction"
    monkeypatch.setattr(distillation_trainer, replaced, getattr(distillation_trainer, replaced))
    names: dict[str, Any] = {}
    for before in ("before `trainer.train()`", "on one card or with DDP"):
        exec(RECIPES.code("Distillation without logits", before=before), names)
    ours = names["GKDTrainerWithoutLogits"] if name == "GKD" else plain
    kernels_ext_npu.register()
    assert logged(name, ours, kernels_ext_npu.kernelize(model), tmp_path) == [
        pytest.approx(step, rel=TOLERANCE) for step in expected
    ]
    assert len(calls) == 3
