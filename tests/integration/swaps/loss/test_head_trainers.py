"""Ten steps of a real Trainer with heads that defer their logits, beside the same steps without."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels import get_local_kernel
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Trainer, TrainingArguments, set_seed

import kernels_ext_npu
from kernels_ext_npu.swaps.loss.steps import Product
from tests.support import checkpoints, pages, zoo

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


@pytest.fixture(autouse=True)
def _registered() -> None:
    kernels_ext_npu.register(kernels=["CrossEntropy"])


def accuracy(prediction: Any) -> dict[str, float]:
    found, labels = prediction.predictions.argmax(-1)[:, :-1], prediction.label_ids[:, 1:]
    return {"accuracy": float((found == labels)[labels != -100].mean())}


def train(model: PreTrainedModel, folder: Path, **options: Any) -> Trainer:
    set_seed(0)
    arguments = TrainingArguments(
        str(folder), max_steps=10, logging_steps=1, learning_rate=1e-3, optim="adamw_torch", save_strategy="no",
        report_to="none", disable_tqdm=True, per_device_train_batch_size=2, **options,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=ROWS, eval_dataset=ROWS[:4], compute_metrics=accuracy)
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
    assert found.evaluate().keys() == expected.evaluate().keys()
    tolerance = 2**-6 if "bf16" in options else TOLERANCE
    for one, other in zip(found.state.log_history, expected.state.log_history):
        for key in {"loss", "grad_norm"} & one.keys():
            assert one[key] == pytest.approx(other[key], rel=tolerance), (one, other)
    assert found.evaluate()["eval_accuracy"] == pytest.approx(expected.evaluate()["eval_accuracy"], abs=0.05)
    assert torch.isfinite(ours.lm_head.weight).all()


def completions(i: int) -> str:
    return f" w3 {'w4 ' * (i % 3)}w5"


def prefers_long_ones(completions: list[str], **_: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


# what each trainer of TRL takes: its rows, and its options
TRL: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "SFT": ([{"prompt": "w1 w2", "completion": completions(i)} for i in range(8)], {"max_length": 16}),
    "DPO": (
        [{"prompt": "w1 w2", "chosen": completions(i), "rejected": " w5 w6"} for i in range(8)],
        {"max_length": 16},
    ),
    "KTO": (
        [{"prompt": "w1 w2", "completion": completions(i), "label": i % 2 == 0} for i in range(8)],
        {"max_length": 16},
    ),
    "GRPO": (
        [{"prompt": f"w{i} w2"} for i in range(8)],
        {"num_generations": 2, "max_completion_length": 4, "beta": 0.1, "temperature": 0.7, "entropy_coef": 0.1},
    ),
}


def losses_of(name: str, model: PreTrainedModel, folder: Path) -> list[float]:
    import datasets
    import trl

    rows, options = TRL[name]
    words = AutoTokenizer.from_pretrained(folder)
    arguments = getattr(trl, f"{name}Config")(
        str(folder / "output"), max_steps=3, logging_steps=1, report_to="none", disable_tqdm=True, save_strategy="no",
        per_device_train_batch_size=2, bf16=False, gradient_checkpointing=False, learning_rate=1e-3, **options,
    )  # fmt: skip
    reward = {"reward_funcs": prefers_long_ones} if name == "GRPO" else {}
    set_seed(0)
    trainer = getattr(trl, f"{name}Trainer")(
        model, args=arguments, train_dataset=datasets.Dataset.from_list(rows), processing_class=words, **reward
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("name", TRL)
@pytest.mark.long
def test_steps_of_trl_are_those_without_the_kernel(name: str, tmp_path: Path, monkeypatch) -> None:
    """As they are, and with the log probabilities of the recipe."""
    utils = pytest.importorskip("trl.trainer.utils")
    checkpoints.save(tmp_path, "qwen3")
    model = AutoModelForCausalLM.from_pretrained(tmp_path).to("npu")
    expected = losses_of(name, copy.deepcopy(model), tmp_path)
    assert len(expected) == 3
    ours = kernels_ext_npu.kernelize(model)
    assert losses_of(name, copy.deepcopy(ours), tmp_path) == pytest.approx(expected, rel=TOLERANCE)

    calls = []
    kernel = get_local_kernel(ROOT / "CrossEntropy")
    for taken in ("linear_log_probs", "linear_log_probs_and_entropy"):
        take = getattr(kernel, taken)
        monkeypatch.setattr(kernel, taken, lambda *a, take=take, **options: calls.append(1) or take(*a, **options))
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", utils._ChunkedLogProbFunction)
    recipe = pages.read(pages.DOCS / "recipes.md").code("Log probabilities without logits", before="bfloat16")
    assert kernels_ext_npu.load("CrossEntropy") is kernel
    exec(recipe, {})
    assert losses_of(name, ours, tmp_path) == pytest.approx(expected, rel=TOLERANCE)
    assert len(calls) >= 3


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_that_trl_makes_of_logits(temperature: float) -> None:
    """To the rounding of sums in float32."""
    utils = pytest.importorskip("trl.trainer.utils")
    kernel = get_local_kernel(ROOT / "CrossEntropy")
    hidden, weight = torch.randn(2, 5, 16).npu(), torch.randn(90, 16).npu()
    labels = torch.randint(90, (2, 5)).npu()
    expected = utils.selective_log_softmax(F.linear(hidden, weight) / temperature, labels)
    found = kernel.linear_log_probs(hidden, weight, labels, logit_scale=1 / temperature)
    torch.testing.assert_close(found, expected, rtol=2**-18, atol=2**-18)
