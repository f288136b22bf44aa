"""What all tests share: no network, one thread a process, fresh processes where an import is tested, and what skips."""

import gc
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}

import pytest
import torch

from tests.localhub import LocalHub
from tests.softnpu import whole_database
from tests.support import names_first, npu_counts, real_device
from tests.support.forking import Forks

ROOT = Path(__file__).resolve().parent.parent
MEMORY = "/dev/shm"
ROOM = 4 * 2**30  # bytes; what the tests hold at one time is less than one GiB


def write_into_memory() -> None:
    """Let tests, and what they start, write their files into memory, where there is room and programs may run.

    They write more than a hundred thousand. A file system on a disk takes a millisecond of a core for each, and its
    journal makes the others wait.
    """
    if "TMPDIR" in os.environ or not os.path.isdir(MEMORY) or os.statvfs(MEMORY).f_flag & os.ST_NOEXEC:
        return
    if shutil.disk_usage(MEMORY).free >= ROOM:
        os.environ["TMPDIR"] = tempfile.tempdir = MEMORY


write_into_memory()
torch.set_num_threads(1)
gc.disable()  # until all tests are collected
real_device.play_a_card_where_asked()


def pytest_report_header() -> list[str]:
    return whole_database.header()


def pytest_collection_finish() -> None:
    """Collect garbage from here on, and look for it in what comes: imports leave none, and a million objects.

    Less often than Python does: most of what tests make goes without being looked for.
    """
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()
    leave_guards_untimed()
    leave_absent_devices_unseeded()


def leave_guards_untimed() -> None:
    """Let torch.compile not time guards, for which it empties the caches of the CPU: half the time of a small graph."""
    guards = sys.modules.get("torch._dynamo.guards")
    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda *args: 0.0  # microseconds, which it logs


def leave_absent_devices_unseeded() -> None:
    """Let torch.manual_seed note nothing for devices that are not there: it notes the stack too, for a millisecond."""
    for device in (torch.cuda, torch.mtia, torch.xpu):
        if not device.is_available():
            device.manual_seed_all = lambda seed: None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    whole_database.leave_to_long_runs(items)
    real_device.refuse_parts_of_the_software_device(items)
    names_first.leave_the_rest_where_one_is_gone(items)


def _inherited() -> dict[str, str]:
    """The environment of a user: without what the software device set in this process."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "integration")])
    return {k: v for k, v in os.environ.items() if not k.startswith("ASCEND_")} | {"PYTHONPATH": paths}


def _checked(result: subprocess.CompletedProcess[str], command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    if result.returncode:
        raise AssertionError(f"{command} ended with {result.returncode}\n{result.stdout}\n{result.stderr}")
    return result


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python code, or ``*arguments`` of the interpreter, in a fresh process."""

    def run(
        code: str | None = None,
        *arguments: str,
        check: bool = True,
        python: str = sys.executable,
        directory: Path | None = None,
        **environment: str,
    ) -> subprocess.CompletedProcess[str]:
        npu_counts.skip_code_on_a_card(code)
        command = [python, *(["-c", code] if code is not None else []), *arguments]
        result = subprocess.run(
            command, cwd=directory, env=_inherited() | environment, capture_output=True, text=True, timeout=300
        )
        return _checked(result, command[1:3]) if check else result

    return run


@pytest.fixture(scope="session")
def _forks() -> Iterator[Forks]:
    forks = Forks()
    yield forks
    forks.stop()


@pytest.fixture
def run_forked(_forks: Forks) -> Callable[..., subprocess.CompletedProcess[str]]:
    """As `run_python`, for what needs a process of its own, where the imports of torch are not what is tested."""

    def run(
        code: str | None = None, *arguments: str, check: bool = True, directory: Path | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        npu_counts.skip_code_on_a_card(code)
        result = _forks.run(code, *arguments, directory=directory, given=environment, inherited=_inherited())
        return _checked(result, [code or "", *arguments]) if check else result

    return run


@pytest.fixture(autouse=True)
def _unregistered() -> Iterator[None]:
    """Ends the registration that a test made, if it made one: also where it fails, for the tests behind it."""
    yield
    if package := sys.modules.get("kernels_ext_npu"):
        package.unregister()


@pytest.fixture(autouse=True)
def _without_accelerators() -> Iterator[None]:
    """Forgets the device that accelerate has chosen in a test: it is one for the process."""
    yield
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


@pytest.fixture
def registered() -> None:
    """A registration, which ends with the test as every one does."""
    import kernels_ext_npu

    kernels_ext_npu.register()


@pytest.fixture
def npu_counters() -> Callable[[], dict[str, int]]:
    """Begins to count anew what the software device does, and gives what reads the counts."""
    npu_counts.reset()
    return npu_counts.read


@pytest.fixture
def localhub() -> Iterator[LocalHub]:
    """An empty Hub on loopback, for processes that are started with its `environment`."""
    with LocalHub() as hub:
        yield hub
