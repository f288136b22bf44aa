"""Processes for all tests of a session, and the models that are trained in them."""

from collections.abc import Callable, Iterator
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


class Made(dict[str, Path]):
    """A path for each model, by its name: made when it is first asked for."""

    def __init__(self, make: Callable[[str], Path]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, name: str) -> Path:
        self[name] = self._make(name)
        return self[name]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> Made:
    """A saved checkpoint of each model, by its name."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def make(name: str) -> Path:
        models.save(name, folder / name)
        return folder / name

    return Made(make)


@pytest.fixture(scope="session")
def truths(checkpoints) -> Made:
    """What `models.train` returns for each checkpoint, in a file that processes can read."""

    def make(name: str) -> Path:
        truth = checkpoints[name] / "truth.pt"
        torch.save(models.train(checkpoints[name]), truth)
        return truth

    return Made(make)
