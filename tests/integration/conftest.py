"""Tiny checkpoints on disk, and a registration that ends with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zoo

import kernels_ext_npu


@pytest.fixture
def registered() -> Iterator[None]:
    kernels_ext_npu.register()
    yield
    kernels_ext_npu.unregister()


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
