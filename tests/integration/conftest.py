"""Tiny checkpoints on disk, a bundle, and which layers run."""

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer

from kernels_ext_npu.distribution import bundles
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


@pytest.fixture(scope="session")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of the kernels that are here."""
    path = tmp_path_factory.mktemp("bundle") / "kernels.zip"
    bundles.write(path)
    return path


@pytest.fixture
def layers_that_run(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The classes of the layers of Qwen3-MoE models, one for each call, as they run during the test."""
    ran: list[str] = []
    forward = Qwen3MoeDecoderLayer.forward

    def run(self, *args, **kwargs):
        ran.append(type(self).__name__)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(Qwen3MoeDecoderLayer, "forward", run)
    return ran
