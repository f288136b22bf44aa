"""Tiny checkpoints on disk."""

import gc
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import zoo


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a saved model of the zoo."""
    saved: dict[str, Path] = {}

    def save(name: str) -> Path:
        if name not in saved:
            saved[name] = tmp_path_factory.mktemp(name)
            zoo.build(name).save_pretrained(saved[name])
        return saved[name]

    return save


@pytest.fixture(scope="module")
def frozen() -> None:
    """For tests that collect garbage: what is there before is none, and to look at it costs a quarter of a second."""
    gc.collect()
    gc.freeze()
