"""Connect software devices: ``init_process_group("hccl")`` works, carried by gloo over the loopback address.

torch_npu's own entries stay: its ``c10d::`` operators for the device are all that dist.*, functional collectives,
DTensor, DDP and FSDP end in, and there the tensors are handed over to gloo as CPU tensors on the same bytes.

``softnpu/README.md`` says what each file is for.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

NAME = "hccl"


def install() -> None:
    """Let process groups named ``hccl`` be ours. What carries them is loaded with the first one."""
    if dist.is_available():
        dist.Backend._plugins[NAME.upper()] = dist.Backend._BackendPlugin(_create, extended_api=True)
        # The gloo of "cpu:gloo,npu:hccl" takes the address of the host's name otherwise. The devices are all here.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _create(options: Any, _: Any) -> Any:
    """Make the backend of a new group.

    Raises:
        NotImplementedError: this torch has not yet what the collectives are made of.
    """
    if not hasattr(torch._prims_common, "is_non_overlapping_and_dense_or_false"):
        raise NotImplementedError(
            f"collectives of software devices are made for torch 2.13, and torch {torch.__version__} lacks what they "
            "are made of; one device works"
        )
    from softnpu.hccl import c10d_kernels
    from softnpu.hccl.backend import HCCL

    c10d_kernels.install()
    return HCCL(options)
