"""Programs that torchrun starts, and what is left of them."""

import contextlib
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
SECONDS = 150  # all of it, on a machine that does other things besides
MARK = "TESTS_DISTRIBUTED_RUN"


class Launch(NamedTuple):
    """What a launch came to."""

    code: int
    output: str
    left: list[str]  # command lines of the processes that are still there


def launch(*command: str, directory: Path, **environment: str) -> Launch:
    """Run a command to its end, which has to come within ``SECONDS``."""
    mark = uuid.uuid4().hex
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ASCEND_", "SOFTNPU_", "GLOO_")) and name not in ("LOCAL_WORLD_SIZE", "MASTER_ADDR")
    }
    process = subprocess.run(
        command,
        cwd=directory,
        env=inherited | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", MARK: mark} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    left = processes_with(f"{MARK}={mark}")
    for pid in left:
        os.kill(pid, 9)
    return Launch(process.returncode, process.stdout, list(left.values()))


def processes_with(variable: str) -> dict[int, str]:
    """Processes that have a variable in their environment, with their command lines."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended
            if variable.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return {pid: line for pid, line in found.items() if line}  # without those that only wait for their parent
