"""What a strict variant promises, tested on the release that it names, or on any other with the variant that it takes.

`make test-variants` runs these tests on every release of variants.toml and says which variant it has to be; `make test`
runs them on the pinned release, where torch-npu has to be the one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from kernels import get_local_kernel

from kernels_ext_npu.catalogue import REPOSITORIES
from tests.support.proofs import ROOT


@pytest.fixture(scope="session")
def variant() -> str:
    """The variant that has to be taken here."""
    return os.environ.get("EXPECTED_VARIANT", "torch-npu")


@pytest.fixture(scope="session")
def kernels() -> dict[str, ModuleType]:
    """The repositories as a user gets them: loaded by `kernels`, which chooses the variant."""
    return {name: get_local_kernel(ROOT / name) for name in REPOSITORIES}


@pytest.fixture
def largest(record_property) -> Callable[[str, torch.dtype, float], None]:
    """Takes a difference into the report of the run."""
    return lambda what, dtype, value: record_property(f"{what} {str(dtype).removeprefix('torch.')}", value)
