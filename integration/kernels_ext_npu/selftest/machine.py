"""What is known of the machine that a report is of: versions, chip and driver, and nothing that tells whose it is."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "torch_npu", "transformers", "kernels")


def describe() -> dict[str, Any]:
    """Return the facts of a report's head; on the software device it says that it is one."""
    import torch_npu
    from torch_npu.utils.collect_env import get_cann_version

    import softnpu
    from kernels_ext_npu import __version__
    from kernels_ext_npu.doctor.disk_probe import hardware

    software = softnpu.is_software()
    return {
        "device": "software device" if software else "card",
        "chip": torch_npu.npu.get_device_name(0),
        "driver": None if software else hardware(Path("/"))["driver"],
        "cann": get_cann_version(),
        "kernels-ext-npu": __version__,
        **{package: _version(package) for package in PACKAGES},
        "python": platform.python_version(),
        "processor": platform.machine(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
