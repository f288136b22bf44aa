"""Build the runtime libraries that torch_npu links against from C, once, and load them before torch."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = [Path(__file__).with_name(name) for name in ("ascendcl.c", "streams.c")]
HEADER = Path(__file__).with_name("runtime.h")
RUNTIME = "libascendcl.so"
# what torch_npu's DT_NEEDED names besides, and libopapi.so, which older releases open when they are imported: empty
# libraries that lead to the runtime
OTHERS = (
    "libhccl.so", "libacl_op_compiler.so", "libge_runner.so", "libgraph.so", "libacl_tdt_channel.so", "libopapi.so",
)  # fmt: skip
# what torch_npu and kernels read as the version of CANN, unless SOFTNPU_CANN names another: the newest release that
# torch_npu's table of 2.13 names
CANN_VERSION = "9.1.0"


def real_device() -> bool:
    """Tell whether the Ascend driver offers a device. Each one is a node /dev/davinci<N>, in containers too."""
    return any(node.removeprefix("davinci").isdigit() for node in os.listdir("/dev") if node.startswith("davinci"))


def load() -> ctypes.CDLL:
    """Make the libraries available to torch_npu, and set what it reads from the environment.

    Raises:
        ImportError: there is no C compiler, the compiler failed, or the cache cannot be written.
    """
    home = cache() / _fingerprint()
    if not home.exists():
        _build(home)
    # a soname that is loaded already satisfies DT_NEEDED and dlopen
    runtime, *_ = [ctypes.CDLL(str(home / name), mode=ctypes.RTLD_GLOBAL) for name in (RUNTIME, *OTHERS)]
    os.environ |= {"ASCEND_HOME_PATH": str(home), "ASCEND_OPP_PATH": str(home / "opp"), "TASK_QUEUE_ENABLE": "0"}
    return runtime


def cache() -> Path:
    """Return the folder of the built libraries: ``$XDG_CACHE_HOME/softnpu``, by default ``~/.cache/softnpu``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "softnpu"


def cann_version() -> str:
    """Return the version of CANN that the software device has, as CANN's own install file would say it.

    Raises:
        ImportError: SOFTNPU_CANN is no version of CANN.
    """
    version = os.environ.get("SOFTNPU_CANN") or CANN_VERSION
    if re.match(r"\d\.\d(\.|$)", version) is None:
        raise ImportError(f"SOFTNPU_CANN={version}: a version of CANN is written as 8.2.RC1 or {CANN_VERSION}")
    return version


def _fingerprint() -> str:
    """Hash everything that the built folder depends on, so that a folder never has to be updated."""
    files = [*SOURCES, HEADER, Path(__file__)]
    parts = [*(file.read_bytes() for file in files), platform.machine().encode(), cann_version().encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _build(home: Path) -> None:
    """Build in a folder of our own, then rename it: several processes may start at once."""
    compiler = os.environ.get("CC") or "cc"
    if shutil.which(compiler) is None:
        raise ImportError(
            f"softnpu builds a small library when it is first used and found no C compiler ({compiler!r}). "
            "Install one (Debian and Ubuntu: apt-get install gcc; openEuler: dnf install gcc) or set CC."
        )
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f"{home.name}.", dir=home.parent))
    except OSError as error:
        raise ImportError(
            f"softnpu keeps its libraries in {home.parent} and cannot write there ({error}). "
            "Set XDG_CACHE_HOME to a folder that you may write to."
        ) from error
    try:
        _compile(compiler, fresh / RUNTIME, [f'-DCANN_VERSION="{cann_version()}"', *map(str, SOURCES)])
        for name in OTHERS:
            _compile(compiler, fresh / name, ["-Wl,--no-as-needed", str(fresh / RUNTIME)])
        for folder in ("opp", "runtime", "compiler"):  # torch_npu checks that they exist
            (fresh / folder).mkdir()
        (fresh / "ascend_toolkit_install.info").write_text(f"package_name=softnpu\nversion={cann_version()}\n")
        fresh.chmod(0o755)
        try:
            fresh.rename(home)
        except OSError:  # another process was faster, with the same content
            if not home.exists():
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _compile(compiler: str, library: Path, inputs: list[str]) -> None:
    command = [compiler, "-O1", "-fPIC", "-shared", "-w", "-o", str(library), f"-Wl,-soname,{library.name}", *inputs]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise ImportError(f"softnpu could not build {library.name}: {' '.join(command)}\n{result.stderr.strip()}")


def refuse_late_import() -> None:
    """Raise if torch is there already: then torch_npu has been loaded without us, or can no longer be."""
    if "torch" in sys.modules:
        raise ImportError(
            "import softnpu before torch, transformers or anything else that imports torch: it provides the libraries "
            "that torch looks for when it starts. Put `import softnpu` on the first line of your program, or run it "
            "with `python -m softnpu script.py`; with pytest, use `pytest -p softnpu.pytest_plugin`."
        )
