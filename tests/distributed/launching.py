"""Programs that torchrun starts, and what is left of them."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path(__file__).resolve().parent.parent.parent
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
SECONDS = 150  # all of it, on a machine that does other things besides


class Launch(NamedTuple):
    """What a launch came to."""

    code: int
    output: str
    left: list[str]  # command lines of the processes that are still there


def launch(*command: str, directory: Path, **environment: str) -> Launch:
    """Run a command to its end, which has to come within ``SECONDS``, in a directory where nothing else runs."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ASCEND_", "SOFTNPU_", "GLOO_")) and name not in ("LOCAL_WORLD_SIZE", "MASTER_ADDR")
    }
    run = subprocess.run(
        command,
        cwd=directory,
        env=inherited | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    left = [each for each in psutil.process_iter(["cwd", "cmdline"]) if each.info["cwd"] == str(directory)]
    for process in left:
        process.kill()
    return Launch(run.returncode, run.stdout, [" ".join(process.info["cmdline"]) for process in left])
