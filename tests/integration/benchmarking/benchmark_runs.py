"""Run `kernels-ext-npu benchmark` with small configs, and read the rows of its reports."""

from functools import partial
from pathlib import Path

from transformers import AutoConfig

from tests.support import commands
from tests.support.sizes import sizes

HIDDEN, TOKENS = 128, 16
SIZES = sizes(HIDDEN, 128, heads=2, keys=1, width=64, layers=3, words=32)
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
# as they are, in one dtype
SMALL = ("--dtype", "bf16", "--tokens", TOKENS, "--shrink", 1)
run = partial(commands.run, "benchmark")
refusal = partial(commands.refusal, "benchmark")


def write_config(folder: Path, model_type: str, **others) -> Path:
    """Write a small config.json of a model type, and return its path."""
    AutoConfig.for_model(model_type, **SIZES | others).save_pretrained(folder)
    return folder / "config.json"


def rows(report: dict, **wanted: str) -> list[dict]:
    return [row for row in report["results"] if all(row[key].startswith(value) for key, value in wanted.items())]
