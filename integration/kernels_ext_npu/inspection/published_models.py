"""Sizes of models as their publishers wrote them down: ``published/`` has what their config.json files say of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Published:
    """A config.json in this package, and the repository on the Hub whose sizes it has."""

    file: Path

    @property
    def source(self) -> str:
        """The address of the config.json that the sizes come from."""
        return f"https://huggingface.co/{json.loads(self.file.read_text())['_name_or_path']}/blob/main/config.json"


MODELS = {file.stem: Published(file) for file in sorted((Path(__file__).parent / "published").glob("*.json"))}


def config(name: str) -> PreTrainedConfig:
    """Return the configuration of a model in MODELS.

    Raises:
        KeyError: there is no such model.
    """
    from transformers import AutoConfig  # the command line shows the names, and waits for nothing

    described = json.loads(MODELS[name].file.read_text())
    described.pop("_name_or_path")
    return AutoConfig.for_model(described.pop("model_type"), **described)
