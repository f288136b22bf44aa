"""A probe of signs of Ascend hardware and of CANN on this machine, without torch."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from shutil import which
from typing import Any

from kernels_ext_npu.machine import hardware
from kernels_ext_npu.machine.processes import say

NPU_SMI_LIMIT = 10.0


def hardware_and_cann() -> None:
    """Say which signs of a card there are, where CANN is, and what the driver's tool answers."""
    say(step="looking for hardware")
    say(**hardware.signs(Path("/")))
    say(step="looking for CANN")
    say(found=hardware.installed_cann())
    for variable in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        if os.environ.get(variable):
            say(**{variable: hardware.describe_cann(Path(os.environ[variable]))})
    say(step="npu-smi info")
    say(npu_smi=_npu_smi())


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
