"""Try a built file as a user would: an empty environment, another folder, no network once it is installed."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from releasing import ReleaseError

# far above what a step takes: half a minute, and minutes for the installation of torch
SECONDS = 1800
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"

# Every Python of the environment refuses what leaves the machine. Sockets of this machine stay: processes use them.
OFFLINE = """
import socket

_connect = socket.socket.connect

def connect(self, address):
    host = address[0] if isinstance(address, tuple) else ""
    if host in ("", "localhost", "::1") or str(host).startswith("127."):
        return _connect(self, address)
    raise OSError(f"the trial of a release has no network, and {address} was asked for")

socket.socket.connect = connect
"""

SMALL_MODEL = """
import sys
from transformers import Qwen3Config, Qwen3ForCausalLM
sizes = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=2, vocab_size=99, **sizes)).save_pretrained(sys.argv[1])
"""


@dataclass(frozen=True)
class Step:
    """Hold what was tried, and what it said where it failed."""

    name: str
    failure: str | None = None


class Environment:
    """An environment of `python` below `folder`, and commands in it."""

    def __init__(self, python: str, folder: Path) -> None:
        self.folder, self.home = folder, folder / "home"
        self.home.mkdir(parents=True)
        self._call([python, "-m", "venv", str(folder / "venv")])
        self.bin = folder / "venv" / "bin"

    def install(self, artifact: Path, pins: dict[str, str]) -> None:
        """Install torch, torch_npu and `artifact` with what it declares, as README's quick start does.

        Raises:
            ReleaseError: the index at hand has no build of torch for this Python, or pip fails.
        """
        try:
            self._pip(pins["torch"])
        except ReleaseError:
            self._pip(pins["torch"], "--index-url", TORCH_CPU_INDEX)
        self._pip("--no-deps", pins["torch_npu"])
        self._pip("numpy", "pyyaml")
        self._pip(str(artifact))

    def disconnect(self) -> None:
        """Leave every Python of this environment without a network."""
        (site,) = (self.folder / "venv" / "lib").glob("python3.*/site-packages")
        (site / "without_network.py").write_text(OFFLINE)
        (site / "without_network.pth").write_text("import without_network\n")

    def run(self, *command: str) -> str:
        """Run a program of the environment, away from the project, and return what it printed.

        Raises:
            ReleaseError: it fails.
        """
        own = {"HOME": str(self.home), "XDG_CACHE_HOME": str(self.home / "cache"), "OMP_NUM_THREADS": "1"}
        return self._call([str(self.bin / command[0]), *command[1:]], **own)

    def _pip(self, *arguments: str) -> None:
        # with the settings and the cache of the user who releases
        self._call([str(self.bin / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check", *arguments])

    def _call(self, command: list[str], **variables: str) -> str:
        left_out = ("ASCEND_", "HF_", "PYTHON", "VIRTUAL_ENV")
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
        try:
            result = subprocess.run(
                command, cwd=self.home, env=inherited | variables, capture_output=True, text=True, timeout=SECONDS
            )
        except subprocess.TimeoutExpired as error:
            raise ReleaseError(f"{' '.join(command)}: not done after {SECONDS} seconds") from error
        if result.returncode:
            said = (result.stdout + result.stderr).strip().splitlines()[-15:]
            raise ReleaseError("\n".join([f"{' '.join(command)} ended with {result.returncode}:", *said]))
        return result.stdout


def steps(environment: Environment, version: str, quick_start: str) -> Iterator[Step]:
    """Try the installed package, a step after the other; a failure does not keep the next from being tried."""
    home = environment.home
    program = str(environment.bin / "kernels-ext-npu")
    (home / "small_model.py").write_text(SMALL_MODEL)
    (home / "quick_start.py").write_text(quick_start.replace("Qwen/Qwen3-8B", str(home / "model")))

    def states_its_version() -> None:
        found = environment.run("kernels-ext-npu", "--version").strip()
        if found != version:
            raise ReleaseError(f"kernels-ext-npu --version says {found}, and the release is {version}")

    def runs_the_quick_start() -> None:
        environment.run("python", "-m", "softnpu", str(home / "small_model.py"), str(home / "model"))
        report = environment.run("python", "-m", "softnpu", str(home / "quick_start.py"))
        if not re.search(r"(\d+) of \1 norms", " ".join(report.split())):
            raise ReleaseError(f"README's quick start swaps no norms:\n{report}")

    tried = {
        "--version": states_its_version,
        "quick start": runs_the_quick_start,
        "doctor": lambda: environment.run("python", "-m", "softnpu", program, "doctor"),
        "selftest": lambda: environment.run("kernels-ext-npu", "selftest", "--quick"),
    }
    for name, attempt in tried.items():
        yield _step(name, attempt)


def _step(name: str, attempt: Callable[[], object]) -> Step:
    try:
        attempt()
    except ReleaseError as error:
        return Step(name, str(error))
    return Step(name)


def quick_start(readme: str) -> str:
    """Return the first example of README.md that loads a model.

    Raises:
        ReleaseError: none does, or it loads another model than the trial has a small one for.
    """
    examples = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    code = next((code for code in examples if "from_pretrained" in code), "")
    if '"Qwen/Qwen3-8B"' not in code:
        raise ReleaseError(
            "README.md has no example that loads Qwen/Qwen3-8B, which the trial runs: change one of them"
        )
    return code
