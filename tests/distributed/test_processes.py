"""The processes that the tests of this folder run on."""

import os

import pytest
import torch
import torch.distributed as dist

from tests.distributed.processes import FailedOnRanksError

pytestmark = pytest.mark.distributed  # it ends the processes again and again


def total() -> float:
    tensor = torch.full((3,), float(dist.get_rank() + 1), device="npu")
    dist.all_reduce(tensor)
    return tensor.sum().item()


def fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("what went wrong")
    dist.barrier()


def die_on_one() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def test_processes_reduce_a_tensor(two_ranks):
    assert two_ranks.run(total) == [9.0, 9.0]


def test_a_failure_is_told_with_its_rank_and_the_next_run_has_new_processes(two_ranks):
    with pytest.raises(FailedOnRanksError, match=r"rank 1: Traceback[\s\S]*what went wrong"):
        two_ranks.run(fail_on_one)
    assert two_ranks.run(total) == [9.0, 9.0]


def test_a_dead_process_ends_the_others(two_ranks):
    with pytest.raises(FailedOnRanksError, match="rank 1: its process ended"):
        two_ranks.run(die_on_one)
