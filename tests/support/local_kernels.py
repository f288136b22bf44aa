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
    """Make the fixture of a conftest.py that gives a repository."""

    @pytest.fixture(scope="session")
    def fixture() -> ModuleType:
        """The repository that is tested in this folder, as `kernels` loads it for a user."""
        return kernel(repository)

    return fixture
