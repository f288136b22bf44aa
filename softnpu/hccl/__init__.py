"""Collectives of software devices: ``init_process_group("hccl")`` works, carried by gloo over the loopback address.

torch_npu's own entries stay: its ``c10d::`` operators for the device are all that dist.*, functional collectives,
DTensor, DDP and FSDP end in, and there the tensors are handed over to gloo as CPU tensors on the same bytes.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

NAME = "hccl"


def install() -> None:
    """Let process groups named ``hccl`` be ours. What carries them is loaded with the first one."""
    if dist.is_available():
        dist.Backend._plugins[NAME.upper()] = dist.Backend._BackendPlugin(_create, extended_api=True)


def _create(options: Any, _: Any) -> Any:
    from softnpu.hccl import dispatch
    from softnpu.hccl.backend import HCCL

    dispatch.install()
    return HCCL(options)
