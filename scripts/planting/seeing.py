"""Run the tests of a repository in a copy of the tree that has a fault."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from planting.faults import ROOMS, Fault

# of all repositories: every function and every layer
COMMON = (
    "tests/variants/test_functions.py",
    "tests/variants/test_layers.py",
    "tests/integration/selftest/test_functions_at_limits.py",
)
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+::[^\n]*?)(?: - |$)", re.MULTILINE)
_PASSED = 0, 5  # pytest: all passed; there was none


class Copy:
    """A copy of what git has of a clone, in which faults are planted one at a time."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root, folder
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True).stdout
        for name in filter(None, listed.decode().split("\0")):
            if os.path.lexists(root / name):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, folder / name, follow_symlinks=False)

    def seen(self, fault: Fault) -> str | None:
        """Plant a fault, and return the first test that fails, or None if none does; then take it out.

        Raises:
            ValueError: the line of the fault is not there any more.
            RuntimeError: pytest could not run the tests.
        """
        before = {path: path.read_bytes() for path in fault.paths(self.folder)}
        try:
            fault.plant(self.folder)
            return self._first_failure(fault)
        finally:
            for path, content in before.items():
                path.write_bytes(content)

    def _first_failure(self, fault: Fault) -> str | None:
        if (self.folder / ROOMS / fault.repository).is_dir():
            tests = [f"tests/integration/{fault.repository}"]
        else:
            (package,) = (path.name for path in (self.folder / fault.repository / "torch-ext").iterdir())
            tests = [f"tests/{package}", *COMMON]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider"]
        run = subprocess.run([*command, "-m", "not long", *tests], cwd=self.folder, capture_output=True, text=True)
        if run.returncode in _PASSED:
            return None
        failed = _FAILED.search(run.stdout)
        if run.returncode != 1 or failed is None:
            raise RuntimeError(
                f"{fault.name}: pytest ended with {run.returncode}\n{run.stdout[-2000:]}{run.stderr[-2000:]}"
            )
        return failed[1]
