"""The scripts in examples/ run as they are, and give what the same lines without kernels give on the CPU.

Those that the page on recipes explains are compared in test_recipes.py.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.docs.test_recipes import EXAMPLES, FUSED, SCRIPTS, in_float32, replaced, without_kernels
from tests.support import checkpoints

# what each prints that the other device has to print, too
pytestmark = pytest.mark.software  # which counts what the scripts launch
PRINTED = {
    "long_context.py": r"loss (\S+)",
    "continuous_batching.py": r"\? .*",
}
# which have a test of their own: the notebook in tests/scripts/test_docs.py, and what takes several devices in
# tests/distributed/test_split_sequences.py
OTHERS = {"kernel_function.py", "quick_start.ipynb", "split_sequences.py", "trl_grpo.py", "vision_language.py"}
ARGUMENTS = {"long_context.py": ["128"]}
TRAINED = """
import json, pathlib, kernels_ext_npu, softnpu
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
swapped = {row.swapped for row in kernels_ext_npu.report(trainer.model)}
pathlib.Path("evidence.json").write_text(json.dumps([losses, list(swapped), softnpu.counters()]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    checkpoints.save(tmp_path / "Qwen/Qwen3-0.6B", "qwen3")
    checkpoints.save_vision_language(tmp_path / "google/gemma-3-4b-it")
    checkpoints.write_data(tmp_path)
    return tmp_path


def with_and_without(name: str, folder: Path, run_forked: Callable, more: str = "") -> list[str]:
    """What a script prints in float32, and the same without kernels on the CPU; ``more`` is its end."""
    script, printed = in_float32((EXAMPLES / name).read_text()), []
    for number, text in enumerate((script, without_kernels(script))):
        path = folder / f"{number}.py"
        path.write_text(text + more)
        result = run_forked(None, "-m", "softnpu", path.name, *ARGUMENTS.get(name, ()), directory=folder)
        assert ("→ RMSNorm" in result.stdout) == (number == 0)
        printed.append(result.stdout)
    return printed


@pytest.mark.parametrize("name", PRINTED)
def test_a_script_prints_what_the_cpu_prints_without_kernels(name: str, folder: Path, run_forked: Callable) -> None:
    """In float32: tokens are the same, and losses to what is printed of them."""
    printed = with_and_without(name, folder, run_forked)
    found, expected = (re.findall(PRINTED[name], text, re.MULTILINE) for text in printed)
    assert found == expected != []


def test_a_model_sees_a_picture_through_the_kernels_as_on_the_cpu(folder: Path, run_forked: Callable) -> None:
    """In float32 to 1e-5 of the largest logit: sums in another order, through two layers of either tower."""
    more = "print('logits', model(**inputs).logits[0].tolist())\n"
    printed = with_and_without("vision_language.py", folder, run_forked, more)
    found, expected = (torch.tensor(json.loads(re.search(r"^logits (.*)", text, re.MULTILINE)[1])) for text in printed)
    assert expected.std() > 0
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_grpo_trains_through_the_kernels(folder: Path, run_forked: Callable) -> None:
    script = (EXAMPLES / "trl_grpo.py").read_text()
    script = replaced(
        script, ("max_completion_length=64", "max_completion_length=8"), ("num_train_epochs=1", "max_steps=2")
    )
    (folder / "script.py").write_text(script + TRAINED)
    run_forked(None, "-m", "softnpu", "script.py", directory=folder)
    losses, swapped, counters = json.loads((folder / "evidence.json").read_text())
    assert len(losses) == 2
    assert swapped == [True]
    assert all(counters[f"{operator}_backward"] for operator in FUSED)
    assert (folder / "output/model.safetensors").exists()


def test_the_kernels_as_functions_agree_with_float64_and_have_gradients(run_forked: Callable) -> None:
    """To 2^-8, a step of bfloat16: what is between input and output is rounded to it a few times."""
    printed = run_forked(None, "-m", "softnpu", str(EXAMPLES / "kernel_function.py")).stdout
    assert float(re.search(r"float64: (\S+)", printed)[1]) <= 2**-8
    assert "gradients: norm, gate.weight, up.weight, down.weight" in printed


def test_the_list_of_examples_names_each_and_each_has_a_test() -> None:
    examples = {path.name for suffix in ("py", "ipynb") for path in EXAMPLES.glob(f"*.{suffix}")}
    listed = set(re.findall(r"^\| \[`(\w+\.\w+)`\]\(\1\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE))
    assert listed == examples == {*SCRIPTS.values(), *PRINTED, *OTHERS}
