"""Processes for all tests of a session, and the models that are trained in them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.distributed import models
from tests.distributed.processes import Processes


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Processes]:
    """Two processes with a software device each."""
    processes = Processes(2)
    yield processes
    processes.stop()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Processes]:
    """Four of them."""
    processes = Processes(4)
    yield processes
    processes.stop()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """A saved checkpoint of each model, by its name."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in models.MODELS:
        models.save(name, folder / name)
    return {name: folder / name for name in models.MODELS}


@pytest.fixture(scope="session")
def truths(checkpoints) -> dict[str, Path]:
    """What `models.train` returns for each checkpoint, in a file that processes can read."""
    for folder in checkpoints.values():
        torch.save(models.train(folder), folder / "truth.pt")
    return {name: folder / "truth.pt" for name, folder in checkpoints.items()}
