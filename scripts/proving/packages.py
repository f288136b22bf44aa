"""Install what runs in a proof: aarch64 wheels in folders of the cache, one a release, shared by all proofs."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from proving import ProvingError, cpu_builds
from proving.interpreters import ARCHITECTURE

# of requirements.txt; what the programs of a proof import
TOOLS = ("accelerate", "hypothesis", "kernels", "packaging", "pytest", "transformers", "typer")
# chosen by hand: as requirements of others they bring another release, or CUDA
CHOSEN = ("torch", "torch-npu")
# required by torch's CUDA builds, of which a CPU build is made
CUDA = ("nvidia-", "cuda-", "triton")
PLATFORMS = ("manylinux_2_28", "manylinux_2_17", "manylinux2014")


class Packages:
    """Keep folders of packages below ``cache`` for one version of Python."""

    def __init__(self, cache: Path, python: str) -> None:
        self.cache, self.python = cache, python

    def tools(self, requirements: Path) -> Path:
        """Return the folder of the pinned tools."""
        wanted = [Requirement(line) for line in _lines(requirements)]
        wanted = [r for r in wanted if r.name in TOOLS and self._applies(r)]
        return self._folder("tools", wanted)

    def release(self, name: str, version: str) -> Path:
        """Return the folder of a release of torch or torch_npu."""
        return self._folder(f"{name}-{version}", [Requirement(f"{name}=={version}")])

    def _folder(self, name: str, wanted: list[Requirement]) -> Path:
        """Return the folder with what is wanted and all that it requires; installed once, whole or not at all."""
        content = "\n".join(sorted(map(str, wanted)))
        digest = hashlib.sha256(content.encode()).hexdigest()[:8]
        folder = self.cache / f"python{self.python}" / f"{name}-{digest}"
        if folder.exists():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
        try:
            self._install(fresh, map(str, wanted), "--no-deps")
            self._install(fresh, self._missing(fresh))
            cpu_builds.leave_cuda_out(fresh)
            fresh.chmod(0o755)
            fresh.rename(folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        return folder

    def _install(self, folder: Path, requirements: Iterable[str], *options: str) -> None:
        wanted = sorted(requirements)
        if not wanted:
            return
        platforms = [f"--platform={name}_{ARCHITECTURE}" for name in PLATFORMS]
        command = [
            sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--only-binary=:all:",
            "--root-user-action=ignore", "--no-compile", "--implementation=cp", f"--python-version={self.python}",
            *platforms, *options, f"--target={folder}", *wanted,
        ]  # fmt: skip
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise ProvingError(
                f"pip has no {', '.join(wanted)} for Python {self.python} on {ARCHITECTURE}:\n{result.stderr.strip()}"
            )

    def _missing(self, folder: Path) -> list[str]:
        """List what the packages of a folder require beyond each other, and beyond what is chosen by hand."""
        installed = {canonicalize_name(found.metadata["Name"]) for found in distributions(path=[str(folder)])}
        required = [r for found in distributions(path=[str(folder)]) for r in self._required(found)]
        present = {*installed, *CHOSEN}
        return sorted({f"{r.name}{r.specifier}" for r in required if canonicalize_name(r.name) not in present})

    def _required(self, found: Distribution) -> list[Requirement]:
        required = [r for r in map(Requirement, found.requires or []) if self._applies(r)]
        return [r for r in required if not canonicalize_name(r.name).startswith(CUDA)]

    def _applies(self, requirement: Requirement) -> bool:
        """Evaluate a marker for the target: pip itself evaluates markers for the machine that it runs on."""
        target = {"platform_machine": ARCHITECTURE, "python_version": self.python, "extra": ""}
        return requirement.marker is None or requirement.marker.evaluate(target)


def _lines(requirements: Path) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in requirements.read_text().splitlines())
    return [line for line in lines if line]
