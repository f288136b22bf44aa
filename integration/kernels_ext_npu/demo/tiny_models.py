"""The tiny random models of the demo, and what it feeds to a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from kernels_ext_npu import model_configs

Inputs = dict[str, torch.Tensor]

_PROMPT, _IMAGE = 12, 99
IN_GRAPHS = {"Qwen3", "gpt-oss"}  # that generate a second time, with one launch for the forward of a token


def loader(config: Any) -> Any:
    """Return the auto class that loads a checkpoint and can generate; None for a model that generates no text."""
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            return auto
    return None


def save(name: str, folder: Path) -> None:
    """Save a tiny random model whose norms and biases are its own.

    Ones and zeros would hide a kernel that ignores them.
    """
    torch.manual_seed(0)
    config = model_configs.config(name)
    model = loader(config).from_config(config)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "norm" in path or path.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def inputs(config: Any) -> Inputs:
    """Make a prompt of two rows; in the demo's own vision-language model it has an image in each of them."""
    text = config.get_text_config()
    ids = torch.randint(2, min(text.vocab_size, 90), (2, _PROMPT))
    vision = getattr(config, "vision_config", None)
    if vision is None or config.image_token_id != _IMAGE or vision.hidden_size != 32:
        return {"input_ids": ids}
    grid = torch.tensor([[1, 4, 4]] * 2)
    patches = torch.randn(2 * 16, 3 * vision.temporal_patch_size * vision.patch_size**2)
    ids[:, 3:7] = _IMAGE  # four patches make a token
    kinds = (ids == _IMAGE).long()
    return {"input_ids": ids, "mm_token_type_ids": kinds, "pixel_values": patches, "image_grid_thw": grid}


def on(device: str, made: Inputs) -> Inputs:
    """Return the inputs on a device."""
    return {name: value.to(device) for name, value in made.items()}
