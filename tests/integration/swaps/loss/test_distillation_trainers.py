"""Steps of TRL's trainers for distillation with the divergence of the recipe, beside the same steps without."""

import copy
from pathlib import Path
from typing import Any

import pytest
from kernels import get_local_kernel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, set_seed

import kernels_ext_npu
from tests.support import checkpoints, pages

ROOT = Path(__file__).resolve().parents[4]
PAGE = pages.read(pages.DOCS / "recipes.md")
CHATS = [
    {"messages": [{"role": "user", "content": f"w1 w{i}"}, {"role": "assistant", "content": "w3 w5" + i % 3 * " w4"}]}
    for i in range(8)
]
PROMPTS = [{"prompt": f"w{i} w2"} for i in range(8)]
# what each trainer takes: its rows, and its options
TRAINERS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "Distillation": (PROMPTS, {"max_completion_length": 4, "temperature": 0.7, "beta": 0.3}),
    "GKD": (CHATS, {"max_new_tokens": 4, "lmbda": 0.5, "beta": 0.3, "max_length": 32}),
}


@pytest.fixture
def model(tmp_path: Path) -> PreTrainedModel:
    checkpoints.save(tmp_path, "qwen3")
    return AutoModelForCausalLM.from_pretrained(tmp_path).to("npu")


def logged(name: str, trainer: type, model: PreTrainedModel, folder: Path) -> list[list[float]]:
    """Train three steps towards a model that is surer of itself; return losses, entropies and norms of gradients."""
    import datasets
    import trl
    from trl.experimental import gkd

    rows, options = TRAINERS[name]
    teacher = copy.deepcopy(model)
    teacher.lm_head.weight.data.mul_(3)
    arguments = {"Distillation": trl.DistillationConfig, "GKD": gkd.GKDConfig}[name](
        str(folder / "output"), max_steps=3, logging_steps=1, report_to="none", disable_tqdm=True, save_strategy="no",
        per_device_train_batch_size=2, bf16=False, gradient_checkpointing=False, learning_rate=1e-3, **options,
    )  # fmt: skip
    set_seed(0)
    made = trainer(
        copy.deepcopy(model), teacher, args=arguments, train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )  # fmt: skip
    made.train()
    steps = [entry for entry in made.state.log_history if "loss" in entry]
    return [[step[key] for key in ("loss", "grad_norm", "entropy") if key in step] for step in steps]


@pytest.mark.long
@pytest.mark.parametrize("name", TRAINERS)
def test_steps_with_the_recipe_are_those_without(name, model: PreTrainedModel, tmp_path: Path, monkeypatch) -> None:
    """Losses, entropies and gradients to 1e-5 in float32, since AdamW divides by a root of squares."""
    trl = pytest.importorskip("trl", minversion="1.16")
    from trl.experimental.gkd import GKDTrainer
    from trl.trainer import distillation_trainer

    plain = {"Distillation": trl.DistillationTrainer, "GKD": GKDTrainer}[name]
    expected = logged(name, plain, model, tmp_path)
    calls: list[int] = []
    kernel = get_local_kernel(ROOT / "CrossEntropy")
    take = kernel.linear_generalized_jsd
    monkeypatch.setattr(kernel, "linear_generalized_jsd", lambda *a, **o: calls.append(1) or take(*a, **o))
    replaced = "ChunkedDivergenceFunction"
    monkeypatch.setattr(distillation_trainer, replaced, getattr(distillation_trainer, replaced))
    names: dict[str, Any] = {}
    for before in ("before `trainer.train()`", "on one card or with DDP"):
        exec(PAGE.code("Distillation without logits", before=before), names)
    ours = names["GKDTrainerWithoutLogits"] if name == "GKD" else plain
    kernels_ext_npu.register()
    found = logged(name, ours, kernels_ext_npu.kernelize(model), tmp_path)
    assert len(found) == len(calls) == 3
    assert found == [pytest.approx(step, rel=1e-5) for step in expected]
