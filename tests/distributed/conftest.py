"""Processes for all tests of a session."""

from collections.abc import Iterator

import pytest

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
