"""Probes of what can be imported: torch and torch_npu alone, a plain torch, transformers and kernels."""

from __future__ import annotations

import os

from kernels_ext_npu.machine.processes import say

TORCH, TORCH_NPU, CANN, DEVICES = "import torch", "import torch_npu", "reading CANN's version", "counting devices"
KERNELS, TRANSFORMERS = "import kernels", "import transformers"


def torch_npu_alone() -> None:
    """Import torch and torch_npu without the software device, and ask for CANN and for devices."""
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    say(step=TORCH)
    import torch

    say(torch=torch.__version__, torch_file=torch.__file__)
    say(**{kind: getattr(torch.version, kind, None) for kind in ("cuda", "hip", "xpu")})
    say(step=TORCH_NPU)
    import torch_npu

    say(torch_npu=torch_npu.__version__)
    say(step=CANN)
    from torch_npu.utils.collect_env import get_cann_version

    say(cann=get_cann_version())
    say(step=DEVICES)
    count = torch_npu.npu.device_count() if torch_npu.npu.is_available() else 0
    say(devices=count)
    say(names=[torch_npu.npu.get_device_name(index) for index in range(count)])


def plain_torch() -> None:
    """Import torch, as a program without softnpu does first."""
    say(step=TORCH)
    import torch  # noqa: F401


def transformers_and_kernels() -> None:
    """Import kernels and transformers, where the device could not be tried."""
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    say(step=KERNELS)
    import kernels  # noqa: F401

    say(step=TRANSFORMERS)
    import transformers  # noqa: F401  its parts ask for torch_npu, which is told by itself
