"""The scripts in examples/ run with `--tiny`, and give what the same lines without kernels give on the CPU.

Those that the page on recipes explains are compared in test_recipes.py. What one of them lacks it says in a sentence.
"""

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kernels_ext_npu.demo import tiny_checkpoints
from tests.conftest import ROOT
from tests.docs.test_recipes import EXAMPLES, FUSED, SCRIPTS, in_float32, replaced, without_kernels

# what each prints that the other device has to print, too
pytestmark = pytest.mark.software  # which counts what the scripts launch
PRINTED = {
    "long_context.py": r"loss (\S+)",
    "continuous_batching.py": r"\? .*",
}
# which have a test of their own: the notebook in tests/scripts/test_docs.py, and what takes several devices in
# tests/distributed/test_split_sequences.py
ARGUMENTS = {"long_context.py": ["--tokens", "128"]}
OTHERS = {
    "kernel_function.py",
    "own_model.py",
    "qlora.py",
    "quick_start.ipynb",
    "split_sequences.py",
    "trl_grpo.py",
    "vision_language.py",
}
TRAINED = """
import json, pathlib, kernels_ext_npu, softnpu
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
swapped = {row.swapped for row in kernels_ext_npu.report(trainer.model)}
pathlib.Path("evidence.json").write_text(json.dumps([losses, list(swapped), softnpu.counters()]))
"""


def with_and_without(name: str, folder: Path, run_forked: Callable, more: str = "") -> list[str]:
    """What a script prints in float32 with `--tiny`, and on the CPU without kernels with the same model from a folder.

    ``more`` is its end.
    """
    script, printed = in_float32((EXAMPLES / name).read_text()), []
    tiny_checkpoints.save(re.search('tiny="(.*?)"', script)[1], folder / "model")
    named = ["model", *ARGUMENTS.get(name, ())]
    for text, arguments in ((script, ["--tiny"]), (without_kernels(script), named)):
        path = folder / name
        path.write_text(text + more)
        result = run_forked(None, "-m", "softnpu", name, *arguments, directory=folder)
        assert ("→ RMSNorm" in result.stdout) == (text == script)
        printed.append(result.stdout)
    return printed


@pytest.mark.parametrize("name", PRINTED)
def test_a_script_prints_what_the_cpu_prints_without_kernels(name: str, tmp_path: Path, run_forked: Callable) -> None:
    """In float32: tokens are the same, and losses to what is printed of them."""
    printed = with_and_without(name, tmp_path, run_forked)
    found, expected = (re.findall(PRINTED[name], text, re.MULTILINE) for text in printed)
    assert found == expected != []


def test_a_model_sees_a_picture_through_the_kernels_as_on_the_cpu(tmp_path: Path, run_forked: Callable) -> None:
    """In float32 to 1e-5 of the largest logit: sums in another order, through two layers of either tower."""
    more = "print('logits', model(**inputs).logits[0].tolist())\n"
    printed = with_and_without("vision_language.py", tmp_path, run_forked, more)
    found, expected = (torch.tensor(json.loads(re.search(r"^logits (.*)", text, re.MULTILINE)[1])) for text in printed)
    assert expected.std() > 0
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_grpo_trains_through_the_kernels(tmp_path: Path, run_forked: Callable) -> None:
    script = (EXAMPLES / "trl_grpo.py").read_text()
    script = replaced(script, ("max_completion_length=64", "max_completion_length=8"))
    (tmp_path / "script.py").write_text(script + TRAINED)
    run_forked(None, "-m", "softnpu", "script.py", "--tiny", directory=tmp_path)
    losses, swapped, counters = json.loads((tmp_path / "evidence.json").read_text())
    assert len(losses) == 2
    assert swapped == [True]
    assert all(counters[f"{operator}_backward"] for operator in FUSED)
    assert (tmp_path / "output/model.safetensors").exists()


def test_adapters_are_trained_on_four_bits_through_the_kernels(tmp_path: Path, run_forked: Callable) -> None:
    """That losses are those of the CPU is in tests/integration/swaps/linear/test_quantised_adapters.py."""
    (tmp_path / "script.py").write_text((EXAMPLES / "qlora.py").read_text() + TRAINED)
    printed = run_forked(None, "-m", "softnpu", "script.py", "--tiny", directory=tmp_path).stdout
    losses, swapped, counters = json.loads((tmp_path / "evidence.json").read_text())
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert swapped == [True]
    assert all(counters[f"{operator}_backward"] for operator in FUSED)
    assert "→ lora_linear: one node" in printed
    assert (tmp_path / "adapters/adapter_model.safetensors").exists()


def test_a_model_of_own_code_is_served_whole_and_trains_as_on_the_cpu(tmp_path: Path, run_forked: Callable) -> None:
    """In float32: losses to what is printed of them."""
    script = replaced((EXAMPLES / "own_model.py").read_text(), ("torch.bfloat16", "enabled=False"))
    printed = []
    for text in (script, without_kernels(script)):
        (tmp_path / "script.py").write_text(text)
        printed.append(run_forked(None, "-m", "softnpu", "script.py", "--tiny", directory=tmp_path).stdout)
    summary = "5 of 5 norms, 2 of 2 gated MLPs, 2 of 2 rotary calls, 2 of 2 attention, 1 of 1 heads swapped"
    assert summary in " ".join(printed[0].split())
    found, expected = (re.findall(r"loss (\S+)", text) for text in printed)
    assert found == expected
    assert len(found) == 5


def test_the_kernels_as_functions_agree_with_float64_and_have_gradients(run_forked: Callable) -> None:
    """To 2^-8, a step of bfloat16: what is between input and output is rounded to it a few times."""
    printed = run_forked(None, "-m", "softnpu", str(EXAMPLES / "kernel_function.py"), "--tiny").stdout
    assert float(re.search(r"float64: (\S+)", printed)[1]) <= 2**-8
    assert "gradients: norm, gate.weight, up.weight, down.weight" in printed


def test_the_list_of_examples_names_each_and_each_has_a_test() -> None:
    examples = {path.name for suffix in ("py", "ipynb") for path in EXAMPLES.glob(f"*.{suffix}")}
    listed = set(re.findall(r"^\| \[`(\w+\.\w+)`\]\(\1\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE))
    assert listed == examples == {*SCRIPTS.values(), *PRINTED, *OTHERS}


# ---- what is missing ------------------------------------------------------------------------------------------------
def said(result: subprocess.CompletedProcess[str]) -> str:
    """The one line that a script has printed, to standard error."""
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    return result.stderr.strip()


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("inference.py", "there is no folder Qwen/Qwen3-0.6B, and the Hub is out of reach ("),
        ("inference.py ./missing", "there is no folder ./missing: name another one, or the id of a model, or take"),
        ("vision_language.py empty", "empty is no model: it has no config.json"),
        ("trainer.py empty", "there is no train.jsonl: write one as the first lines of the script say, or take --tiny"),
        ("trl_sft.py empty rows.jsonl", "there is no rows.jsonl: write one"),
        ("split_sequences.py --tiny", "torchrun has to start it, as in `TORCH_DEVICE_BACKEND_AUTOLOAD=0 torchrun --"),
    ],
)
def test_what_is_missing_is_said_in_a_sentence(command: str, sentence: str, tmp_path: Path, run_forked) -> None:
    (tmp_path / "empty").mkdir()
    script, *arguments = command.split()
    result = run_forked(None, "-m", "softnpu", str(EXAMPLES / script), *arguments, directory=tmp_path, check=False)
    assert said(result).startswith(f"{script}: {sentence}")


def test_a_model_that_the_hub_does_not_have_is_named(tmp_path: Path, run_forked, localhub) -> None:
    script = str(EXAMPLES / "inference.py")
    result = run_forked(None, "-m", "softnpu", script, "a/b", check=False, **localhub.environment(tmp_path))
    assert said(result).startswith("inference.py: there is no folder a/b, and no such model on the Hub for you")


def test_a_package_that_is_missing_is_named(tmp_path: Path, run_python) -> None:
    for path in Path(torch.__file__).parents[1].iterdir():
        if not path.name.startswith("peft"):
            (tmp_path / path.name).symlink_to(path)
    paths = f"{tmp_path}{os.pathsep}{ROOT / 'integration'}"
    result = run_python(None, "-S", str(EXAMPLES / "lora.py"), "--tiny", check=False, PYTHONPATH=paths)
    assert said(result) == "lora.py: peft is not installed: pip install peft"


@pytest.mark.parametrize("name", ["kernel_function.py", "trainer.py"])
def test_without_a_device_the_software_device_is_named(name: str, run_python) -> None:
    result = run_python(None, str(EXAMPLES / name), "--tiny", check=False)
    assert "there is no NPU here: `python -m softnpu" in said(result)
