"""A bundle of what is here."""

from pathlib import Path

import pytest

from kernels_ext_npu.distribution import bundles


@pytest.fixture(scope="session")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "kernels.zip"
    bundles.write(path)
    return path
