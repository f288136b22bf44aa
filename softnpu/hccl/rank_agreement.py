"""Check that the ranks of a group agree: each writes what it does into the group's store; who comes second reads it.

Nobody waits for it, so that it holds up no program that is right.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch_npu import npu


class Agreement:
    """Compare what this rank does with what the others do."""

    def __init__(self, store: dist.Store, group_name: str, rank: int, ranks: int) -> None:
        self._devices, self._calls = dist.PrefixStore("device", store), dist.PrefixStore("call", store)
        self._name, self._rank, self._others = group_name, rank, sorted(set(range(ranks)) - {rank})
        # if two ranks differ, then also two of them that are neighbours
        self._neighbours = {(rank - 1) % ranks, (rank + 1) % ranks} - {rank}
        self._device: torch.device | None = None
        self._call = 0

    def use(self, device: torch.device) -> None:
        """Note that a tensor of this device is going to be sent or received.

        Raises:
            RuntimeError: it is not the device that this rank began with, or another rank's.
        """
        if self._device is None:
            self._claim(device)
            self._device = device
        if device != self._device:
            raise RuntimeError(
                f"HCCL supports one NPU per process: rank {self._rank} of process group {self._name!r} uses "
                f"{self._device} and now has a tensor on {device}. Move it to {self._device}, and call "
                "torch.npu.set_device before the first tensor."
            )

    def _claim(self, device: torch.device) -> None:
        mine = _physical(device)
        for rank, its in _exchange(self._devices, self._rank, mine, self._others):
            if its == mine:
                raise RuntimeError(
                    f"HCCL: ranks {rank} and {self._rank} of process group {self._name!r} are both on device {mine}, "
                    "and a device serves one rank. Call torch.npu.set_device(local_rank) in each process; there are "
                    f"{npu.device_count()} software devices, SOFTNPU_DEVICES sets how many."
                )

    def call(self, what: str) -> None:
        """Compare this rank's next collective: HCCL does so when it connects (EI0005), here it is done at each.

        Raises:
            RuntimeError: another rank called another one.
        """
        self._call += 1
        for rank, its in _exchange(self._calls, self._rank, f"{self._call} {what}", self._neighbours):
            number, _, other = its.partition(" ")
            if int(number) == self._call and other != what:
                raise RuntimeError(
                    "HCCL: The arguments for collective communication are inconsistent between ranks: call "
                    f"{self._call} in process group {self._name!r} is {what} on rank {self._rank} and {other} on rank "
                    f"{rank}"
                )


def _exchange(store: dist.Store, rank: int, mine: str, others: set[int] | list[int]) -> list[tuple[int, str]]:
    store.set(str(rank), mine)
    return [(other, store.get(str(other)).decode()) for other in others if store.check([str(other)])]


def _physical(device: torch.device) -> str:
    """Return the number of a device for all processes: each may see some of the devices only, under numbers from 0."""
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    return visible.split(",")[device.index].strip() if visible else str(device.index)
