"""A probe of signs of Ascend hardware and of CANN on this machine, without torch: all of it is read from files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import which
from typing import Any

from kernels_ext_npu.doctor.probe import note, step

HARDWARE, NPU_SMI, CANN = "looking for hardware", "npu-smi info", "looking for CANN"
HUAWEI, ACCELERATOR = "0x19e5", "0x1200"  # PCI vendor, and class of processing accelerators
NPU_SMI_LIMIT = 10.0


def probe() -> None:
    """Note signs of a card, and CANN's folders."""
    step(HARDWARE)
    note(**hardware(Path("/")))
    step(CANN)
    homes = [variable for variable in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME") if os.environ.get(variable)]
    note(found=[place for root in _roots() for place in installed(root)])
    for variable in homes:
        note(**{variable: described(Path(os.environ[variable]))})
    step(NPU_SMI)
    note(npu_smi=_npu_smi())


def hardware(root: Path) -> dict[str, Any]:
    """Find device nodes, the driver, and the cards on the PCI bus.

    Containers see these even if they were given none.
    """
    nodes = sorted(name for name in _names(root / "dev") if re.fullmatch(r"davinci\d+", name))
    closed = [f"/dev/{name}" for name in nodes if not os.access(root / "dev" / name, os.R_OK | os.W_OK)]
    cards = [
        slot
        for slot in _names(root / "sys/bus/pci/devices")
        if _read(root / "sys/bus/pci/devices" / slot / "vendor") == HUAWEI
        and _read(root / "sys/bus/pci/devices" / slot / "class").startswith(ACCELERATOR)
    ]
    driver = _value(root / "usr/local/Ascend/driver/version.info", "version")
    if driver is None and os.path.isfile(root / "etc/ascend_install.info"):
        driver = "unknown"
    return {"nodes": [f"/dev/{name}" for name in nodes], "closed": closed, "cards": cards, "driver": driver}


def installed(root: Path) -> list[dict[str, Any]]:
    """Find the releases of CANN below a folder such as /usr/local/Ascend, once each."""
    patterns = ("ascend-toolkit/*", "cann", "cann-*", "latest", "nnae/*")
    homes = sorted({home.resolve() for pattern in patterns for home in root.glob(pattern) if os.path.isdir(home)})
    return [place for home in homes if (place := described(home, deep=False))["version"] is not None]


def described(home: Path, deep: bool = True) -> dict[str, Any]:
    """Describe a folder of CANN: its version, and the script that sets the environment up.

    The version is None where no file names one.

    Args:
        deep: look through all folders below, as torch_npu does, and take the last file as it does.
    """
    version, info = None, None
    for path in _infos(home, deep):
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


def _roots() -> list[Path]:
    """Return where CANN's installers put it: for root, for a user, and in an environment of conda."""
    return [Path("/usr/local/Ascend"), Path(os.path.expanduser("~/Ascend")), Path(sys.prefix) / "Ascend"]


def _infos(home: Path, deep: bool) -> Iterator[Path]:
    if deep:
        for folder, _, names in os.walk(os.path.realpath(home)):
            if found := [name for name in names if re.match(r"ascend_.*_install\.info", name)]:
                yield Path(folder) / found[0]
    else:
        yield from (*home.glob("ascend_*_install.info"), *home.glob("*-linux/ascend_*_install.info"))


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


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _npu_smi() -> dict[str, Any] | None:
    """Ask the driver's own tool: None where there is none, otherwise whether it answers."""
    program = which("npu-smi", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/local/bin"]))
    if program is None:
        return None
    try:
        result = subprocess.run(
            [program, "info"], capture_output=True, text=True, errors="replace", timeout=NPU_SMI_LIMIT
        )
    except subprocess.TimeoutExpired:
        return {"program": program, "answers": False, "said": f"no answer within {NPU_SMI_LIMIT:.0f} s"}
    except OSError as error:
        return {"program": program, "answers": False, "said": str(error)}
    said = (result.stderr.strip() or result.stdout.strip()).splitlines()
    ended = f"it ended with {result.returncode}"
    return {"program": program, "answers": result.returncode == 0, "said": ": ".join([ended, *said[-1:]])}
