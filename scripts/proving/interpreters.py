"""Find an aarch64 Python: this machine's own, or Debian's under qemu's user emulation.

Nothing is installed on the machine: packages of the distribution are unpacked in the cache, which needs no root.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from proving import ProvingError

ARCHITECTURE = "aarch64"
QEMU = "qemu-aarch64-static"
COMPILER = "aarch64-linux-gnu-gcc"
# what torch_npu has wheels for in every release from 2.6 to 2.14, and transformers still supports
PYTHONS = ("3.11", "3.10")
# torch imports a third faster than with qemu's default, which emulates the authentication of pointers
PROCESSOR = "neoverse-n1"


@dataclass(frozen=True)
class Interpreter:
    """Say how to start an aarch64 Python, and which version it has: ``3.11``."""

    command: tuple[str, ...]
    version: str
    environment: dict[str, str] = field(default_factory=dict)


def find(cache: Path) -> Interpreter:
    """Find the interpreter for aarch64 programs of this machine, unpacked below ``cache`` where it has to be emulated.

    Raises:
        ProvingError: something that it needs is missing.
    """
    # kernels with bytecode beside them are not published
    bytecode = {"PYTHONPYCACHEPREFIX": str(cache / "bytecode")}
    if platform.machine() == ARCHITECTURE:
        return _native(bytecode)
    missing = [tool for tool in (QEMU, COMPILER, "apt-get", "dpkg-deb") if shutil.which(tool) is None]
    if missing:
        raise ProvingError(
            f"this machine is {platform.machine()}, where aarch64 programs are emulated, and it has no "
            f"{' and no '.join(missing)}. On Debian 12: apt-get install qemu-user-static gcc-aarch64-linux-gnu. "
            "On an aarch64 machine nothing of it is needed."
        )
    root = cache / "root"
    if not root.exists():
        _unpack(root)
    _hide_second_caches(root)
    (python,) = (path for version in PYTHONS if (path := root / "usr" / "bin" / f"python{version}").exists())
    return Interpreter(
        (QEMU, str(python)),
        python.name.removeprefix("python"),
        bytecode | {"QEMU_LD_PREFIX": str(root), "QEMU_CPU": PROCESSOR, "CC": COMPILER},
    )


def _hide_second_caches(root: Path) -> None:
    """Let emulated programs, which see files of ``root`` first, read no size of this machine's second-level caches.

    cpuinfo in libc10.so of later releases of torch ends in a segmentation fault on what an x86_64 machine tells there.
    """
    for cache in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index2"):
        size = root / cache.relative_to("/") / "size"
        size.parent.mkdir(parents=True, exist_ok=True)
        size.touch()


def _native(environment: dict[str, str]) -> Interpreter:
    version = "{}.{}".format(*sys.version_info)
    if version not in PYTHONS:
        raise ProvingError(
            f"this is Python {version}; torch_npu 2.6 to 2.14 has wheels for Python {' and '.join(PYTHONS)}: "
            f"make clean, then make test-variants PYTHON=python{PYTHONS[0]}"
        )
    return Interpreter((sys.executable,), version, environment)


def _unpack(root: Path) -> None:
    """Unpack an aarch64 Python with the libraries that the wheels need, from where this machine's packages are."""
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="root.", dir=root.parent) as folder:
        state = Path(folder)
        for name in ("state/lists/partial", "cache/archives/partial", "root"):
            (state / name).mkdir(parents=True)
        (state / "status").touch()
        apt = [
            "apt-get", "-qq",
            *(f"-o{option}" for option in (
                "APT::Architecture=arm64", "APT::Architectures=arm64", f"Dir::State={state}/state",
                f"Dir::State::status={state}/status", f"Dir::Cache={state}/cache", "Debug::NoLocking=1",
                "APT::Sandbox::User=root",
            )),
        ]  # fmt: skip
        _run([*apt, "update"], "the lists of arm64 packages")
        known = subprocess.run(
            [apt[0].replace("get", "cache"), *apt[2:], "pkgnames", "python3."], capture_output=True, text=True
        )
        offered = set(re.findall(r"^python(3\.\d+)$", known.stdout, re.MULTILINE))
        version = next((version for version in PYTHONS if version in offered), None)
        if version is None:
            raise ProvingError(
                f"apt offers Python {', '.join(sorted(offered)) or 'in no version'} for arm64, and torch_npu 2.6 to "
                f"2.14 has wheels for {' and '.join(PYTHONS)}: use Debian 12, or an aarch64 machine"
            )
        packages = [f"python{version}", "libstdc++6", "zlib1g"]
        _run([*apt, "install", "-y", "--no-install-recommends", "--download-only", *packages], "arm64 packages")
        for package in (state / "cache" / "archives").glob("*.deb"):
            _run(["dpkg-deb", "-x", str(package), str(state / "root")], package.name)
        (state / "root").rename(root)


def _run(command: list[str], what: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise ProvingError(f"{what}: {' '.join(command)} ended with {result.returncode}\n{result.stderr.strip()}")
