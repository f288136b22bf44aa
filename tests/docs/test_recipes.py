"""The scripts of the page on recipes, and its lines for frameworks, one after the other on the software device.

The name of their model is a folder here, a tiny random checkpoint, and their files of data lie beside it: not a word of
them is changed. What they compute, in bfloat16 as they are and, since that is coarse, in float32 too, is compared with
the same script without kernels on the CPU in float32.
"""

import fcntl
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.support import checkpoints, pages

pytestmark = pytest.mark.software  # which counts what the recipes launch
EXAMPLES = pages.DOCS.parent / "examples"
ENGLISH, CHINESE = (pages.read(pages.DOCS / name) for name in ("recipes.md", "recipes.zh.md"))
TRAINING = ["Trainer", "TRL", "LoRA"]
RECIPES = ["Inference", *TRAINING]
PLAIN = " without kernels"
# the sections of the page that have a script
SCRIPTS = {
    "Inference": "inference.py",
    "Trainer": "trainer.py",
    "TRL": "trl_sft.py",
    "LoRA": "lora.py",
    "Qwen3.5": "packed_qwen3_5.py",
}
MODEL, LINEAR_MODEL = "Qwen/Qwen3-0.6B", "Qwen/Qwen3.5-0.8B"
PACKED = "DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)"
FUSED = {"npu_rms_norm", "npu_swiglu", "npu_rotary_mul"}
# what a Qwen3 of two layers has
KINDS = {"norms": 9, "gated MLPs": 2, "rotary calls": 2, "rotary tables": 1, "attention": 2, "heads": 1}

# After a recipe: what it did, and what its model computes for a prompt from then on.
EVIDENCE = """
import json, pathlib, kernels_ext_npu, softnpu, torch
counters = softnpu.counters()
training = "trainer" in globals()
found = trainer.model.eval() if training else model
prompt = torch.arange(8, 24, device=found.device)[None]
evidence = {
    "device": found.device.type,
    "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry] if training else [],
    "report": [[row.kind, row.swapped, row.reason] for row in kernels_ext_npu.report(found)],
    "counters": {name: count for name, count in counters.items() if count},
    "logits": found(input_ids=prompt).logits.float().tolist(),
    "tokens": [] if training else output.tolist(),
}
pathlib.Path("evidence.json").write_text(json.dumps(evidence))
"""
# Recipes one after the other, in folders of their own; adapters are drawn at random.
RUN = """
import os, runpy, sys, kernels_ext_npu, softnpu, torch
for folder in sys.argv[1:]:
    torch.manual_seed(0)
    softnpu.reset_counters()
    os.chdir(folder)
    runpy.run_path("recipe.py", run_name="__main__")
    kernels_ext_npu.unregister()
"""


def script(name: str) -> str:
    return (EXAMPLES / SCRIPTS[name]).read_text()


def replaced(text: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new)
    return text


def in_float32(script: str) -> str:
    for old, new in (("bf16=True", "bf16=False"), ('dtype="bfloat16"', 'dtype="float32"')):
        script = script.replace(old, new)
    assert "bf16=True" not in script
    assert "bfloat16" not in script
    return script


def without_kernels(script: str) -> str:
    """The same script for the CPU."""
    lines = [line for line in script.splitlines(True) if "kernels_ext_npu" not in line and "torch.npu" not in line]
    plain = "".join(lines).replace(', device_map="npu", use_kernels=True', "").replace('"npu"', '"cpu"')
    plain = plain.replace(', attn_implementation="npu_flash_attention"', "")
    if "Trainer" in plain:
        plain = replaced(plain, ('"output",', '"output", use_cpu=True,'))
    assert not re.search(r"\bnpu|use_kernels", plain)
    return plain


def all_weights(script: str) -> str:
    """The recipe of Qwen3.5 without adapters, as the page says."""
    kept = "".join(line for line in script.splitlines(True) if "peft" not in line and "projections" not in line)
    return in_float32(kept)


def padded(script: str) -> str:
    """The same without kernels on rows that are padded: transformers' own functions take no packed ones."""
    plain = without_kernels(script)
    return replaced(
        plain,
        (PACKED, "DataCollatorForLanguageModeling(tokenizer, mlm=False)"),
        ("WithFlattening", "ForLanguageModeling"),
    )


def linear_scripts() -> dict[str, str]:
    """The recipe of Qwen3.5 as it is, in float32, and of all weights."""
    packed = script("Qwen3.5")
    return {
        "Qwen3.5": packed,
        "Qwen3.5 in float32": in_float32(packed),
        "Qwen3.5, all weights": all_weights(packed),
    }


class Workshop:
    """Where the recipes run."""

    def __init__(self, root: Path, run_forked: Callable) -> None:
        self.root, self.run_forked = root, run_forked

    def folder(self, name: str, script: str) -> Path:
        """A new folder with a script, the checkpoint and the data."""
        if not (self.root / "Qwen").exists():
            checkpoints.save(self.root / MODEL, "qwen3")
            checkpoints.save(self.root / LINEAR_MODEL, "qwen3_5_text")
        folder = self.root / name
        folder.mkdir()
        checkpoints.write_data(folder)
        (folder / "Qwen").symlink_to(self.root / "Qwen")
        (folder / "recipe.py").write_text(script + EVIDENCE)
        return folder

    def run(self, *folders: Path) -> list[dict[str, Any]]:
        """What the scripts in these folders did, in one process."""
        (self.root / "run.py").write_text(RUN)
        arguments = [str(self.root / "run.py"), *map(str, folders)]
        self.run_forked(None, "-m", "softnpu", *arguments, HF_DATASETS_CACHE=str(self.root / "datasets"))
        return [json.loads((folder / "evidence.json").read_text()) for folder in folders]


class Evidence(dict[str, dict[str, Any]]):
    """What scripts did, by their names, and the folder in which each has a folder."""

    root: Path


@pytest.fixture
def recipes(tmp_path_factory: pytest.TempPathFactory, worker_id: str, run_forked: Callable) -> Evidence:
    """What all scripts do, in one process, which the first test that asks starts, whichever worker has it."""
    base = tmp_path_factory.getbasetemp()
    root = (base if worker_id == "master" else base.parent) / "recipes"
    root.mkdir(exist_ok=True)
    found = root / "found.json"
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            workshop, scripts = Workshop(root, run_forked), all_scripts()
            did = workshop.run(*(workshop.folder(script, text) for script, text in scripts.items()))
            found.write_text(json.dumps(dict(zip(scripts, did))))
        evidence = Evidence(json.loads(found.read_text()))
        evidence.root = root
        return evidence


@pytest.fixture
def expected(recipes) -> dict[str, dict[str, Any]]:
    """What the scripts do without kernels on the CPU."""
    return {name.removesuffix(PLAIN): evidence for name, evidence in recipes.items() if name.endswith(PLAIN)}


def all_scripts() -> dict[str, str]:
    """Each as it is and in float32, there without kernels too, and the lines for frameworks."""
    made = both_precisions({name: script(name) for name in RECIPES}) | linear_scripts()
    precise = {name: text for name, text in made.items() if "bf16=True" not in text and "bfloat16" not in text}
    plain = {name: (padded if "Qwen" in name else without_kernels)(text) for name, text in precise.items()}
    theirs = "".join(line for line in made["LoRA in float32"].splitlines(True) if "kernels_ext_npu" not in line)
    frameworks = {"frameworks": ENGLISH.code("ms-swift") + theirs}
    return made | {f"{name}{PLAIN}": script for name, script in plain.items()} | frameworks


def both_precisions(scripts: dict[str, str]) -> dict[str, str]:
    return scripts | {f"{name} in float32": in_float32(script) for name, script in scripts.items()}


def assert_swapped(found: dict[str, Any]) -> None:
    assert found["device"] == "npu"
    assert Counter(kind for kind, _, _ in found["report"]) == KINDS
    assert {(swapped, reason) for _, swapped, reason in found["report"]} == {(True, None)}
    assert found["counters"].keys() >= FUSED


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert expected["device"] == "cpu"
    assert not any(name.startswith("npu_") for name in expected["counters"])
    assert found["losses"] == pytest.approx(expected["losses"], rel=tolerance)
    a, b = (torch.tensor(evidence["logits"]) for evidence in (found, expected))
    assert (a - b).norm() <= 8 * tolerance * b.norm()  # of a few steps of training, and of two layers


def saved(folder: Path) -> torch.Tensor:
    """The logits of what a recipe saved, in a model without kernels on the CPU."""
    if (folder / "adapters").exists():
        base = AutoModelForCausalLM.from_pretrained(folder / MODEL, dtype="float32")
        model: Any = PeftModel.from_pretrained(base, folder / "adapters")
    else:
        model = AutoModelForCausalLM.from_pretrained(folder / "output", dtype="float32")
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(8, 24)[None]).logits


# ---- each as it is --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", TRAINING)
def test_a_recipe_trains_through_the_kernels_as_the_cpu_does_without(recipes, expected, name) -> None:
    """In bfloat16 to 2^-8, its step: the last product of a loss is rounded to it. In float32 to 1e-5: AdamW divides by
    a root of squares.
    """
    found, precise = recipes[name], recipes[f"{name} in float32"]
    for evidence in (found, precise):
        assert_swapped(evidence)
        assert {f"{operator}_backward" for operator in FUSED} <= evidence["counters"].keys()
    assert len(found["losses"]) == 4
    assert_same(found, expected[f"{name} in float32"], 2**-8)
    assert_same(precise, expected[f"{name} in float32"], 1e-5)
    assert (saved(recipes.root / f"{name} in float32") - torch.tensor(precise["logits"])).abs().max() <= 1e-5


def test_the_inference_recipe_gives_the_tokens_of_the_cpu(recipes, expected) -> None:
    found, precise = recipes["Inference"], recipes["Inference in float32"]
    for evidence in (found, precise):
        assert_swapped(evidence)
    assert_same(found, expected["Inference in float32"], 2**-8)
    assert_same(precise, expected["Inference in float32"], 1e-6)
    assert precise["tokens"] == expected["Inference in float32"]["tokens"]


@pytest.mark.parametrize(
    ("name", "truth", "tolerance"),
    [
        ("Qwen3.5", "Qwen3.5 in float32", 2**-8),
        ("Qwen3.5 in float32", "Qwen3.5 in float32", 1e-5),
        ("Qwen3.5, all weights", "Qwen3.5, all weights", 1e-5),
    ],
)
def test_qwen35_trains_on_packed_rows_as_the_cpu_does_on_padded_ones(recipes, expected, name, truth, tolerance) -> None:
    found = recipes[name]
    assert found["device"] == "npu"
    assert {(swapped, reason) for _, swapped, reason in found["report"]} == {(True, None)}
    assert Counter(kind for kind, _, _ in found["report"])["linear attention calls"] == 4
    assert found["counters"].keys() >= FUSED
    assert not {"linalg_solve_triangular", "triangular_solve"} & found["counters"].keys()
    assert len(found["losses"]) == 4
    assert_same(found, expected[truth], tolerance)


# ---- what the page says besides -------------------------------------------------------------------------------------
def test_everywhere_takes_a_model_that_somebody_else_loads_and_adapts(recipes, expected) -> None:
    """The two lines for frameworks, before the recipe of LoRA without its own."""
    assert_swapped(recipes["frameworks"])
    assert_same(recipes["frameworks"], expected["LoRA in float32"], 1e-5)


PITFALLS = """
import kernels_ext_npu, softnpu, torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch_npu.optim import NpuFusedAdamW
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer

def train(kernels, **options):
    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B", dtype="float32")
    rows = [{"input_ids": [8 + i, 9, 10, 11], "labels": [8 + i, 9, 10, 11]} for i in range(8)]
    options = dict(report_to="none", save_strategy="no", max_steps=2, disable_tqdm=True) | options
    trainer = Trainer(model=model, args=TrainingArguments("output", **options), train_dataset=rows)
    if kernels:
        kernels_ext_npu.kernelize(trainer.model)
    trainer.train()

for options in ({"fp16": True}, {"fp16": True, "optim": "adamw_torch"}, {"optim": "adamw_torch_npu_fused"}):
    for kernels in (False, True):
        try:
            train(kernels, **options)
            print("found: trained")
        except Exception as error:
            print(f"found: {type(error).__name__}: {error}")

for dropped in (False, True):
    weights = [torch.nn.Parameter(torch.ones(8, device="npu")) for _ in range(2)]
    optimizers = NpuFusedAdamW(weights[:1], lr=0.1), torch.optim.AdamW(weights[1:], lr=0.1)
    for step in (1.0, -3.0):
        for weight, optimizer in zip(weights, optimizers):
            (weight * step).sum().backward()
            optimizer.step()
            if dropped:
                weight.grad = None
            else:
                optimizer.zero_grad()
    print("found:", torch.allclose(*weights))

try:
    weight = torch.nn.Parameter(torch.ones(8, device="npu", dtype=torch.bfloat16))
    weight.sum().backward()
    NpuFusedAdamW([weight]).step()
except TypeError as error:
    print("found:", "bfloat16" in str(error))

model = get_peft_model(
    AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B", device_map="npu"), LoraConfig(target_modules=["up_proj"])
)
rows = lambda: {row.reason for row in kernels_ext_npu.report(kernels_ext_npu.kernelize(model)) if "MLP" in row.kind}
print("found:", rows())
model = model.merge_and_unload()
print("found:", rows())

pairs = Dataset.from_list([{"prompt": "w1 w2", "chosen": " w3", "rejected": " w4"}])
trainer = DPOTrainer("Qwen/Qwen3-0.6B", args=DPOConfig("output"), train_dataset=pairs)
for each in (trainer.model, trainer.ref_model):
    print("found:", {row.swapped for row in kernels_ext_npu.report(kernels_ext_npu.kernelize(each))})
"""


def test_the_pitfalls_are_as_the_page_says(tmp_path, run_forked) -> None:
    folder = Workshop(tmp_path, run_forked).folder("pitfalls", "")
    out = run_forked(PITFALLS, directory=folder).stdout.splitlines()
    lines = [line.removeprefix("found: ") for line in out if line.startswith("found: ")]
    scaler = "TypeError: Adam.step() got an unexpected keyword argument 'grad_scaler'"
    text = (pages.DOCS / "recipes.md").read_text()
    assert scaler in " ".join(text.split())
    assert lines[:2] == [scaler] * 2
    assert lines[2:5] == ["trained"] * 3
    assert lines[5].startswith("RuntimeError: The size of tensor a (")
    assert lines[6:8] == ["True", "False"]  # the same with and without dropping gradients?
    reason = "two products, since a projection is a peft.tuners.lora.layer.Linear"
    assert lines[8] == "True"  # its error names bfloat16
    assert lines[9:11] == [str({reason}), str({None})]
    assert lines[11:] == ["{True}"] * 2
    assert reason in " ".join(text.split())


def test_both_languages_have_the_same_code_and_sections() -> None:
    assert [(b.heading, b.language, b.text) for b in CHINESE.blocks] == [
        (b.heading, b.language, b.text) for b in ENGLISH.blocks
    ]
    assert len(CHINESE.headings) == len(ENGLISH.headings)
    assert len(ENGLISH.blocks) == 14


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_section_links_its_script(name: str) -> None:
    section = (pages.DOCS / "recipes.md").read_text().split(f"\n## {name}\n")[1].split("\n## ")[0]
    assert f"(../examples/{SCRIPTS[name]})" in section
