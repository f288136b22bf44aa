"""The scripts in examples/ run as they are, and give what the same lines without kernels give on the CPU.

Those that the page on recipes explains are compared in test_recipes.py.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.docs.test_recipes import EXAMPLES, FUSED, SCRIPTS, replaced
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


def on_the_cpu(script: str) -> str:
    lines = [line for line in script.splitlines(True) if "kernels_ext_npu" not in line and "torch.npu" not in line]
    plain = "".join(lines).replace(', device_map="npu", use_kernels=True', "").replace('"npu"', '"cpu"')
    plain = plain.replace(', attn_implementation="npu_flash_attention"', "")
    assert not re.search(r"\bnpu", plain)
    return plain


@pytest.mark.parametrize("name", PRINTED)
def test_a_script_prints_what_the_cpu_prints_without_kernels(name: str, folder: Path, run_forked: Callable) -> None:
    """In float32: tokens are the same, and losses to what is printed of them."""
    script = (EXAMPLES / name).read_text().replace('dtype="bfloat16"', 'dtype="float32"')
    found = []
    for number, text in enumerate((script, on_the_cpu(script))):
        path = folder / f"{number}.py"
        path.write_text(text)
        result = run_forked(None, "-m", "softnpu", path.name, *ARGUMENTS.get(name, ()), directory=folder)
        assert ("→ RMSNorm" in result.stdout) == (number == 0)
        found.append(re.findall(PRINTED[name], result.stdout, re.MULTILINE))
    assert found[0] == found[1] != []


def test_a_model_sees_a_picture_through_the_kernels_as_on_the_cpu(folder: Path, run_forked: Callable) -> None:
    """In float32 to 1e-5 of the largest logit: sums in another order, through two layers of either tower."""
    script = (EXAMPLES / "vision_language.py").read_text().replace('dtype="bfloat16"', 'dtype="float32"')
    found = []
    for number, text in enumerate((script, on_the_cpu(script))):
        path = folder / f"{number}.py"
        path.write_text(text + "print('logits', model(**inputs).logits[0].tolist())\n")
        result = run_forked(None, "-m", "softnpu", path.name, directory=folder)
        assert ("→ RMSNorm" in result.stdout) == (number == 0)
        found.append(torch.tensor(json.loads(re.search(r"^logits (.*)", result.stdout, re.MULTILINE)[1])))
    assert found[1].std() > 0
    assert (found[0] - found[1]).abs().max() <= 1e-5 * found[1].abs().max()


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
