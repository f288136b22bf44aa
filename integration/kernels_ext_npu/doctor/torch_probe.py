"""A probe of torch and torch_npu as they are on this machine, without the software device."""

from __future__ import annotations

import os

from kernels_ext_npu.doctor.probe import note, step

TORCH, TORCH_NPU, CANN, DEVICES = "import torch", "import torch_npu", "reading CANN's version", "counting devices"


def probe() -> None:
    """Import torch and torch_npu, and ask for devices."""
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    step(TORCH)
    import torch

    note(torch=torch.__version__, torch_file=torch.__file__)
    for kind in ("cuda", "hip", "xpu"):
        note(**{kind: getattr(torch.version, kind, None)})
    step(TORCH_NPU)
    import torch_npu

    note(torch_npu=torch_npu.__version__)
    step(CANN)
    from torch_npu.utils.collect_env import get_cann_version

    note(cann=get_cann_version())
    step(DEVICES)
    count = torch_npu.npu.device_count() if torch_npu.npu.is_available() else 0
    note(devices=count)
    note(names=[torch_npu.npu.get_device_name(index) for index in range(count)])
