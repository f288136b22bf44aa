"""Lengths that the host reads: together where they were made in one thread, and never those of another one."""

import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from threading import Barrier
from types import ModuleType

import pytest
import torch


@pytest.fixture
def host_values(kernel: ModuleType) -> ModuleType:
    return import_module(f"{kernel.__name__}.varlen.host_values")


def test_what_waits_in_another_thread_is_left_to_it(host_values: ModuleType) -> None:
    """Its stream may not have computed it."""
    here = host_values.HostValues(torch.tensor([1]))
    with ThreadPoolExecutor(1) as threads:
        there = threads.submit(lambda: host_values.HostValues(torch.tensor([2]))).result()
        assert here.values.tolist() == [1]
        assert there._values is None
        assert threads.submit(lambda: there.values.tolist()).result() == [2]


def test_a_thread_reads_what_another_one_has_made(host_values: ModuleType) -> None:
    """As autograd's do when they compute a forward again."""
    here, other = host_values.HostValues(torch.tensor([3])), host_values.HostValues(torch.tensor([4]))
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(lambda: here.values.tolist()).result() == [3]
    assert other.values.tolist() == [4]


@pytest.fixture
def _switching_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_switching_often")
def test_threads_make_and_read_at_once(host_values: ModuleType) -> None:
    start = Barrier(4)

    def make_and_read(number: int) -> list[int]:
        start.wait()
        found = []
        for index in range(300):
            several = [host_values.HostValues(torch.tensor([number, index])) for _ in range(3)]
            found += several[-1].values.tolist()
        return found

    with ThreadPoolExecutor(4) as threads:
        for number, found in enumerate(threads.map(make_and_read, range(4))):
            assert found == [value for index in range(300) for value in (number, index)]
