"""Sizes of models, each a config.json: those that publishers wrote down, and tiny ones with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

PUBLISHED = tuple(sorted(path.stem for path in (Path(__file__).parent / "published").glob("*.json")))
TINY = ("Qwen3", "Llama", "Gemma 3", "Olmo 3", "Phi-3", "GLM-4", "Qwen2.5-VL", "gpt-oss", "Qwen3-MoE", "DeepSeek-V3")
DENSE_AND_EXPERTS = "Qwen3-MoE with a dense layer"  # one of each, so that every repository is used


def config(name: str) -> PreTrainedConfig:
    """Return the configuration of one of these models."""
    from transformers import AutoConfig  # the command line shows the names, and waits for nothing

    sizes = _read(name)
    sizes.pop("_name_or_path", None)
    return AutoConfig.for_model(sizes.pop("model_type"), **sizes)


def source(name: str) -> str:
    """Return where the publisher of a model says its sizes."""
    return f"https://huggingface.co/{_read(name)['_name_or_path']}/blob/main/config.json"


def _read(name: str) -> dict[str, Any]:
    folder = "published" if name in PUBLISHED else "tiny"
    return json.loads((Path(__file__).parent / folder / f"{name}.json").read_text())
