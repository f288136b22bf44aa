"""The kernel as a user gets it: loaded by `kernels` from the repository."""

from pathlib import Path
from types import ModuleType

import pytest
from kernels import get_local_kernel

REPOSITORY = Path(__file__).resolve().parent.parent.parent / "Linear"


@pytest.fixture(scope="session")
def kernel() -> ModuleType:
    return get_local_kernel(REPOSITORY)
