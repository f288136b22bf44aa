"""What the tests of scripts share: the repositories with all variants, a small one, and publishers in this process."""

import shutil
import types
from collections.abc import Callable
from pathlib import Path

import build
import huggingface_hub.utils._http as hub_http
import pytest
from huggingface_hub import HfApi, constants, file_download
from rich.console import Console

from kernels_ext_npu.distribution.variants import all_variants, repositories, write
from publishing.remote import Patience
from publishing.report import Report
from publishing.run import Request, publish
from tests.localhub import LocalHub
from tests.support.tiny import Clone


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the repositories of the project, of each the build with all variants."""
    root = tmp_path_factory.mktemp("whole")
    for repository in repositories(build.ROOT):
        write(all_variants(repository), root / repository.name / "build")
    return root


@pytest.fixture
def norm(tmp_path: Path) -> Path:
    """A copy of one repository with its links, in a folder that is like a clone."""
    shutil.copy(build.ROOT / "variants.toml", tmp_path)
    for name in ("common", "RMSNorm"):
        shutil.copytree(build.ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "RMSNorm"


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path / "clone")


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client of this process may use the network, with a token, and does not wait before it tries again."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_tests")
    for module in (hub_http, file_download):
        clock = types.SimpleNamespace(**vars(module.time) | {"sleep": lambda seconds: None})
        monkeypatch.setattr(module, "time", clock)


@pytest.fixture
def publisher(localhub: LocalHub, clone: Clone, online: None) -> Callable[..., Report]:
    """Publishes the small repository from this process, without loading it."""

    def run(*variants: str, repository: Path | None = None, patience: Patience | None = None, **fields) -> Report:
        patience = patience or Patience(seconds=0)
        request = Request(str(repository or clone.repository), variants, load=False, patience=patience, **fields)
        return publish(request, Console(quiet=True), HfApi(endpoint=localhub.url))

    return run
