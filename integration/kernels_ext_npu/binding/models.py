"""What is asked of the model that a user hands in."""

from __future__ import annotations

from torch import nn


def check_is_module(function: str, model: object) -> None:
    """Raise a TypeError that names the public function if it was called with anything but a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{function}: {model!r} is a {type(model).__name__}, and a loaded model is needed: "
            "AutoModelForCausalLM.from_pretrained(..., device_map='npu')"
        )
