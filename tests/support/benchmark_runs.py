"""Run `kernels-ext-npu benchmark` with small configs, and read the rows of its reports."""

from pathlib import Path

from click.testing import Result
from transformers import AutoConfig
from typer.testing import CliRunner

from kernels_ext_npu.cli import app

HIDDEN, TOKENS = 128, 16
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 32,
    "num_hidden_layers": 3,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}


def write_config(folder: Path, model_type: str, **sizes) -> Path:
    """Write a small config.json of a model type, and return its path."""
    AutoConfig.for_model(model_type, **SIZES | sizes).save_pretrained(folder)
    return folder / "config.json"


def run(*arguments: str | Path | int) -> Result:
    return CliRunner().invoke(app, ["benchmark", *map(str, arguments)])


def rows(report: dict, **wanted: str) -> list[dict]:
    return [row for row in report["results"] if all(row[key].startswith(value) for key, value in wanted.items())]
