"""Repositories of the tree, as a user gets them."""

import functools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from kernels import get_local_kernel

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def kernel(repository: str) -> ModuleType:
    """Load a repository by its name, such as ``RMSNorm``, by `kernels`."""
    return get_local_kernel(ROOT / repository)


def kernel_fixture(repository: str) -> Callable[[], ModuleType]:
    """Make the fixture `kernel` for the conftest.py of a repository's tests: its package."""
    return pytest.fixture(scope="session", name="kernel")(lambda: kernel(repository))
