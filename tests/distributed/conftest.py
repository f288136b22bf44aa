"""Processes for all tests of a session, and the models that are trained in them."""

import functools
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.distributed import models
from tests.distributed.processes import Processes


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Processes]:
    """Two processes with a software device each."""
    with closing(Processes(2)) as processes:
        yield processes


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Processes]:
    """Four of them."""
    with closing(Processes(4)) as processes:
        yield processes


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> Callable[[str], Path]:
    """A saved checkpoint of each model, by its name: made when it is first asked for."""

    @functools.cache
    def saved(name: str) -> Path:
        folder = tmp_path_factory.mktemp("checkpoint")
        models.save(name, folder)
        return folder

    return saved


@pytest.fixture(scope="session")
def truths(checkpoints) -> Callable[..., list[models.Tensors]]:
    """What `models.train` returns for each checkpoint."""
    return functools.cache(lambda name, **options: models.train(checkpoints(name), **options))
