"""The scripts of the page on recipes, and its lines for frameworks, one after the other on the software device.

They take the model and the data of `--tiny`: not a word of them is changed. What they compute, in bfloat16 as they are
and, since that is coarse, in float32 too, is compared with the same script without kernels on the CPU in float32.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from kernels_ext_npu.demo import tiny_checkpoints
from tests.support import pages

pytestmark = pytest.mark.software  # which counts what the recipes launch
EXAMPLES = pages.DOCS.parent / "examples"
ENGLISH, CHINESE = (pages.read(pages.DOCS / name) for name in ("recipes.md", "recipes.zh.md"))
PRECISE, PLAIN = " in float32", " without kernels"
# the sections of the page that have a script
SCRIPTS = {
    "Inference": "inference.py",
    "Trainer": "trainer.py",
    "TRL": "trl_sft.py",
    "LoRA": "lora.py",
    "Qwen3.5": "packed_qwen3_5.py",
}
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
folders = sys.argv[1:]
for folder in folders:
    torch.manual_seed(0)
    softnpu.reset_counters()
    os.chdir(folder)
    sys.argv[1:] = open("arguments").read().split()
    runpy.run_path("recipe.py", run_name="__main__")
    kernels_ext_npu.unregister()
"""


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


def runs_kernels(line: str) -> bool:
    return "kernels_ext_npu" in line and "import arguments" not in line


def without_kernels(script: str) -> str:
    """The same script for the CPU."""
    lines = [line for line in script.splitlines(True) if "torch.npu" not in line and not runs_kernels(line)]
    plain = "".join(lines).replace(', device_map="npu", use_kernels=True', "").replace('"npu"', '"cpu"')
    plain = plain.replace(', attn_implementation="npu_flash_attention"', "")
    if "Trainer" in plain:
        plain = replaced(plain, ('"output",', '"output", use_cpu=True,'))
    assert not re.search(r"\bnpu|use_kernels", plain)
    return plain


def all_weights(script: str) -> str:
    """The recipe of Qwen3.5 without adapters, as the page says."""
    lines = script.splitlines(True)
    kept = "".join(line for line in lines if "get_peft_model" not in line and "projections" not in line)
    return in_float32(kept)


def padded(script: str) -> str:
    """The same without kernels on rows that are padded: transformers' own functions take no packed ones."""
    plain = without_kernels(script)
    return replaced(
        plain,
        (PACKED, "DataCollatorForLanguageModeling(tokenizer, mlm=False)"),
        ("WithFlattening", "ForLanguageModeling"),
    )


def all_scripts() -> dict[str, str]:
    """Each as it is, in float32 and there without kernels too; Qwen3.5 of all weights, and the lines for frameworks."""
    scripts = {name: (EXAMPLES / file).read_text() for name, file in SCRIPTS.items()}
    precise = {name: in_float32(text) for name, text in scripts.items()}
    precise["Qwen3.5, all weights"] = all_weights(scripts["Qwen3.5"])
    plain = {name: (padded if "Qwen" in name else without_kernels)(text) for name, text in precise.items()}
    theirs = "".join(line for line in precise["LoRA"].splitlines(True) if not runs_kernels(line))
    precise["frameworks"] = ENGLISH.code("ms-swift") + theirs
    scripts |= {f"{name}{PRECISE}": text for name, text in precise.items()}
    return scripts | {f"{name}{PLAIN}": text for name, text in plain.items()}


def made(root: Path, name: str, text: str) -> Path:
    """A new folder with a script and its arguments; without kernels they are the paths of what `--tiny` takes."""
    folder = root / name
    folder.mkdir()
    (folder / "recipe.py").write_text(text)
    arguments = ["--tiny"]
    if name.endswith(PLAIN):
        tiny_checkpoints.save("Qwen3.5" if "Qwen" in name else "Qwen3", folder / "model")
        arguments = ["model"]
    if name.endswith(PLAIN) and "Inference" not in name:
        data = "chat.jsonl" if "TRL" in name else "train.jsonl"
        tiny_checkpoints.write_data(data, folder)
        arguments.append(data)
    (folder / "arguments").write_text(" ".join(arguments))
    return folder


def assert_swapped(found: dict[str, Any], name: str) -> None:
    assert found["device"] == "npu"
    assert {(swapped, reason) for _, swapped, reason in found["report"]} == {(True, None)}
    assert found["counters"].keys() >= FUSED
    kinds = Counter(kind for kind, _, _ in found["report"])
    if "Qwen3.5" in name:
        assert kinds["linear attention calls"] == 4
        assert not {"linalg_solve_triangular", "triangular_solve"} & found["counters"].keys()
    else:
        assert kinds == KINDS
    if "Inference" not in name:
        assert {f"{operator}_backward" for operator in FUSED} <= found["counters"].keys()
        assert len(found["losses"]) == 4


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert expected["device"] == "cpu"
    assert not any(name.startswith("npu_") for name in expected["counters"])
    assert found["losses"] == pytest.approx(expected["losses"], rel=tolerance)
    a, b = (torch.tensor(evidence["logits"]) for evidence in (found, expected))
    assert (a - b).norm() <= 8 * tolerance * b.norm()  # of a few steps of training, and of two layers


def saved(folder: Path) -> torch.Tensor:
    """The logits of what a recipe saved, in a model without kernels on the CPU."""
    if (folder / "adapters").exists():
        base = AutoModelForCausalLM.from_pretrained(folder.with_name(f"LoRA{PLAIN}") / "model", dtype="float32")
        model: Any = PeftModel.from_pretrained(base, folder / "adapters")
    else:
        model = AutoModelForCausalLM.from_pretrained(folder / "output", dtype="float32")
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(8, 24)[None]).logits


def test_each_script_computes_through_the_kernels_what_the_cpu_does_without(tmp_path, run_forked, subtests) -> None:
    """In bfloat16 to 2^-8, its step: the last product of a loss is rounded to it. In float32 to 1e-5: AdamW divides by
    a root of squares. The lines for frameworks stand before the recipe of LoRA without its own, which somebody else
    loads and adapts.
    """
    (tmp_path / "run.py").write_text(RUN)
    folders = {name: made(tmp_path, name, text + EVIDENCE) for name, text in all_scripts().items()}
    arguments = [str(tmp_path / "run.py"), *map(str, folders.values())]
    run_forked(None, "-m", "softnpu", *arguments, HF_DATASETS_CACHE=str(tmp_path / "datasets"))
    did = {name: json.loads((folder / "evidence.json").read_text()) for name, folder in folders.items()}
    for name, found in did.items():
        if name.endswith(PLAIN):
            continue
        with subtests.test(name):
            assert_swapped(found, name)
            script = name.removesuffix(PRECISE).replace("frameworks", "LoRA")
            tolerance = 2**-8 if not name.endswith(PRECISE) else 1e-6 if script == "Inference" else 1e-5
            assert_same(found, did[f"{script}{PLAIN}"], tolerance)
            if name == f"Inference{PRECISE}":
                assert found["tokens"] == did[f"Inference{PLAIN}"]["tokens"]
            elif name.endswith(PRECISE) and script in ("Trainer", "TRL", "LoRA"):
                assert (saved(folders[name]) - torch.tensor(found["logits"])).abs().max() <= 1e-5


# ---- what the page says besides -------------------------------------------------------------------------------------
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
    tiny_checkpoints.save("Qwen3", tmp_path / "Qwen/Qwen3-0.6B")
    out = run_forked(PITFALLS, directory=tmp_path).stdout.splitlines()
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
    assert len(ENGLISH.blocks) == 19


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_section_links_its_script(name: str) -> None:
    section = (pages.DOCS / "recipes.md").read_text().split(f"\n## {name}\n")[1].split("\n## ")[0]
    assert f"(../examples/{SCRIPTS[name]})" in section
