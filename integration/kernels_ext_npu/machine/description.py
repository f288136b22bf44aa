"""The description of a machine that every report and every command gives: device, CANN, and versions of packages."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from kernels_ext_npu import __version__
from kernels_ext_npu.environment import installed
from kernels_ext_npu.machine import hardware

PACKAGES = ("torch", "torch_npu", "transformers", "kernels")
SOFTWARE, CARD = "software device", "card"
CHIP = ("device", "chip", "driver")  # what `device` says in one


def describe() -> dict[str, Any]:
    """Return what is known of this machine and tells nothing of whose it is; torch_npu has to be importable.

    Returns:
        ``device`` is "card" or "software device", ``chip`` what torch_npu calls it, ``driver`` and ``cann`` are
        versions; the names of packages have theirs, None where one is not installed.
    """
    import torch_npu
    from torch_npu.utils.collect_env import get_cann_version

    import softnpu

    software = softnpu.is_software()
    return {
        "device": SOFTWARE if software else CARD,
        "chip": torch_npu.npu.get_device_name(0),
        "driver": None if software else hardware.signs(Path("/"))["driver"],
        "cann": get_cann_version(),
        "kernels-ext-npu": __version__,
        **{package: installed(package) for package in PACKAGES},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",  # what follows names a build
        "processor": platform.machine(),
    }


def device(described: dict[str, Any]) -> str:
    """Say in words what a described machine computes on."""
    chip = described["chip"]
    return f"{SOFTWARE}, as {chip}" if described["device"] == SOFTWARE else str(chip)


def versions(described: dict[str, Any]) -> dict[str, Any]:
    """Return what a description says besides the device: versions, and the processor."""
    return {name: value for name, value in described.items() if name not in CHIP and value is not None}
