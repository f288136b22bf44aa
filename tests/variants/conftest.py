"""What a strict variant promises, tested on the release that it names, or on any other with the variant that it takes.

`make test-variants` runs these tests on every release of variants.toml and says which variant it has to be; `make test`
runs them on the pinned release, where torch-npu has to be the one. The kernels come from a folder with all variants,
also those that the tree leaves out.
"""

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from kernels import get_local_kernel

import kernels_ext_npu
from kernels_ext_npu.catalogue import REPOSITORIES
from kernels_ext_npu.distribution.variants import all_variants, write

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="session")
def variant() -> str:
    """The variant that has to be taken here."""
    return os.environ.get("EXPECTED_VARIANT", "torch-npu")


@pytest.fixture(scope="session")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the repositories, each with all variants, as the package and the Hub hold them."""
    root = tmp_path_factory.mktemp("repositories")
    for name in REPOSITORIES:
        write(all_variants(ROOT / name), root / name / "build")
    return root


@pytest.fixture(scope="session")
def kernels(repositories: Path) -> dict[str, ModuleType]:
    """The repositories as a user gets them: loaded by `kernels`, which chooses the variant."""
    return {name: get_local_kernel(repositories / name) for name in REPOSITORIES}


@pytest.fixture
def registered(repositories: Path) -> None:
    """A registration of these, which ends with the test."""
    kernels_ext_npu.register(source=repositories)


@pytest.fixture
def largest(record_property) -> Callable[[str, torch.dtype, float], None]:
    """Takes a difference into the report of the run."""
    return lambda what, dtype, value: record_property(f"{what} {str(dtype).removeprefix('torch.')}", value)
