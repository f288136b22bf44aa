"""``pytest -p softnpu.pytest_plugin``: tests run with the software device where there is no real one."""

from collections.abc import Callable, Iterator

import pytest

import softnpu


def pytest_report_header() -> str:
    """Say in the header of pytest which device it is."""
    return "npu: software device" if softnpu.is_software() else "npu: real device"


@pytest.fixture
def npu_counters() -> Callable[[], dict[str, int]]:
    """Reads ``softnpu.counters()``, counted from the start of the test."""
    softnpu.reset_counters()
    return softnpu.counters


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fresh device memory holds NaN during the test."""
    with softnpu.poisoned_memory():
        yield
