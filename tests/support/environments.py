"""Make environments with releases of others, which one worker makes for all, beside the torch of the tests."""

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch


def interpreter(factory: pytest.TempPathFactory, worker: str, name: str, *packages: str, deps: bool = True) -> str:
    """Return the interpreter of an environment with some packages, with what they require or without.

    What the index does not install is a reason to skip.
    """
    base = factory.getbasetemp()
    root = (base if worker == "master" else base.parent) / "environments"
    root.mkdir(exist_ok=True)
    outcome = root / f"{name}.txt"
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not outcome.exists():
            outcome.write_text(_made(root / name, *packages, *([] if deps else ["--no-deps"])))
    if reason := outcome.read_text():
        pytest.skip(f"the package index at hand does not install {packages[0]}: {reason}")
    return str(root / name / "bin" / "python")


def _made(folder: Path, *arguments: str) -> str:
    """Make an environment; returns why it cannot be, empty if it is."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "--disable-pip-version-check"]
    result = subprocess.run([*pip, "install", "-q", *arguments], capture_output=True, text=True)
    if result.returncode:
        return " ".join(line for line in result.stderr.splitlines() if line.startswith("ERROR")) or result.stderr[-500:]
    (packages,) = folder.glob("lib/python*/site-packages")
    assert not (packages / "torch").exists()
    # its libraries may be those for CUDA, which do not load here; without any it imports, and nothing here is sound
    shutil.rmtree(packages / "torchaudio" / "lib", ignore_errors=True)
    # behind the environment's own packages, since it is named there
    (packages / "packages_of_the_tests.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return ""
