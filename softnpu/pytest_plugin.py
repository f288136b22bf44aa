"""Run tests with the software device where there is no real one: ``pytest -p softnpu.pytest_plugin``."""

from collections.abc import Callable, Iterator

import pytest

import softnpu


def pytest_report_header() -> str:
    """Say in the header of pytest which device it is."""
    return "npu: software device" if softnpu.is_software() else "npu: real device"


@pytest.fixture
def npu_counters() -> Callable[[], dict[str, int]]:
    """Reset the counters, and return ``softnpu.counters`` for the test to read."""
    softnpu.reset_counters()
    return softnpu.counters


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Let fresh device memory hold NaN during the test."""
    with softnpu.poisoned_memory():
        yield
