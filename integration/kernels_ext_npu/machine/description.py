"""What a machine has, as every report and command describes it; and signs of Ascend hardware and of CANN in files."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kernels_ext_npu import __version__
from kernels_ext_npu.environment import installed

PACKAGES = ("torch", "torch_npu", "transformers", "kernels")
SOFTWARE, CARD = "software device", "card"
CHIP = ("device", "chip", "driver")  # what `device` says in one


def describe() -> dict[str, Any]:
    """Return what is known of this machine and tells nothing of whose it is; torch_npu has to be importable.

    ``device`` is "card" or "software device", ``chip`` what torch_npu calls it; all others are versions, None of what
    is not installed.
    """
    import torch_npu
    from torch_npu.utils.collect_env import get_cann_version

    import softnpu

    software = softnpu.is_software()
    return {
        "device": SOFTWARE if software else CARD,
        "chip": torch_npu.npu.get_device_name(0),
        "driver": None if software else signs(Path("/"))["driver"],
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


HUAWEI, ACCELERATOR = "0x19e5", "0x1200"  # PCI vendor, and class of processing accelerators


def signs(root: Path) -> dict[str, Any]:
    """Find device nodes, the driver, and the cards on the PCI bus below the root of a file system.

    Containers see these even if they were given none.
    """
    nodes = sorted(path.name for path in (root / "dev").glob("*") if re.fullmatch(r"davinci\d+", path.name))
    driver = _value(root / "usr/local/Ascend/driver/version.info", "version")
    if driver is None and os.path.isfile(root / "etc/ascend_install.info"):
        driver = "unknown"
    return {
        "nodes": [f"/dev/{name}" for name in nodes],
        "closed": [f"/dev/{name}" for name in nodes if not os.access(root / "dev" / name, os.R_OK | os.W_OK)],
        "cards": sorted(slot.name for slot in (root / "sys/bus/pci/devices").glob("*") if _is_card(slot)),
        "driver": driver,
    }


def installed_cann() -> list[dict[str, Any]]:
    """Find the releases of CANN where its installers put them: for root, for a user, and in an environment of conda."""
    roots = Path("/usr/local/Ascend"), Path(os.path.expanduser("~/Ascend")), Path(sys.prefix) / "Ascend"
    globs = ("ascend-toolkit/*", "cann", "cann-*", "latest", "nnae/*")
    found = []
    for root in roots:
        homes = {home.resolve() for each in globs for home in root.glob(each) if os.path.isdir(home)}
        found += [describe_cann(home, deep=False) for home in sorted(homes)]
    return [place for place in found if place["version"] is not None]


def describe_cann(home: Path, deep: bool = True) -> dict[str, Any]:
    """Describe a folder of CANN: its version, and the script that sets the environment up.

    The version is None where no file names one.

    Args:
        deep: look through all folders below, as torch_npu does, and take the last file as it does.
    """
    version, info = None, None
    for path in _install_infos(home, deep):
        found = _value(path, "version", like_torch_npu=True)
        if found is not None:
            version, info = found, path
    scripts = [script for folder in (home, home.parent) if os.path.isfile(script := folder / "set_env.sh")]
    return {
        "path": str(home),
        "exists": os.path.isdir(home),
        "readable": os.access(home, os.R_OK | os.X_OK),
        "version": version,
        "info": info and str(info),
        "set_env": str(scripts[0]) if scripts else None,
        "software": info is not None and _value(info, "package_name") == "softnpu",
    }


def _is_card(slot: Path) -> bool:
    return _read(slot / "vendor") == HUAWEI and _read(slot / "class").startswith(ACCELERATOR)


def _install_infos(home: Path, deep: bool) -> Iterator[Path]:
    if not deep:
        yield from (*home.glob("ascend_*_install.info"), *home.glob("*-linux/ascend_*_install.info"))
        return
    for folder, _, names in os.walk(os.path.realpath(home)):
        if found := [name for name in names if re.match(r"ascend_.*_install\.info", name)]:
            yield Path(folder) / found[0]


def _value(path: Path, key: str, like_torch_npu: bool = False) -> str | None:
    """Return the value of a line ``key=value``; None where there is no such line.

    torch_npu takes the first line that contains the key, and what is after its last =.
    """
    for line in _read(path).splitlines():
        name, _, value = line.strip().rpartition("=")
        if (key in line) if like_torch_npu else (name.strip().lower() == key):
            return value
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
