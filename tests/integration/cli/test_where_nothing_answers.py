"""Commands without a network, with a Hub of errors, a full disk, a home that cannot be written: a sentence and a code.

What needs no network asks for none: tests/test_packaging.py runs bundle and selftest behind a proxy that is dead.
"""

from pathlib import Path

import pytest

from kernels_ext_npu.cli.terminal import write_file
from kernels_ext_npu.distribution import bundles
from kernels_ext_npu.environment import RefusedError
from tests.localhub import LocalHub

COMMAND = "from kernels_ext_npu.cli import app; app()"
HOME = {"HOME": "/proc", "XDG_CACHE_HOME": ""}  # which root cannot write to, either
DEAD = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://hub.test", "HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": ""}
SOFTNPU = "Set XDG_CACHE_HOME to a folder that you may write to."


def refused(run_python, code: int, *arguments: str, **environment: str) -> str:
    """Run a command that cannot do what it is asked for, and return the one line that it writes."""
    result = run_python(COMMAND, *arguments, check=False, **environment)
    assert (result.returncode, result.stdout) == (code, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("kernels-ext-npu: ")
    return line


@pytest.mark.software
@pytest.mark.parametrize("command", [["demo"], ["inspect", "qwen3"], ["benchmark"], ["selftest"], ["coverage"]])
def test_a_home_that_cannot_be_written_leaves_no_software_device(run_python, command: list[str]) -> None:
    assert refused(run_python, 2, *command, **HOME).endswith(SOFTNPU)


def test_a_cache_that_cannot_be_written_gets_no_bundle(run_python, archive: Path) -> None:
    line = refused(run_python, 1, "bundle", "--install", str(archive), HF_HOME="/proc/huggingface")
    assert "/proc/huggingface/hub cannot be written: " in line
    assert "Set HF_HOME to a folder that you may write to" in line


def test_a_hub_that_cannot_be_reached_or_answers_with_errors_gives_no_bundle(
    run_python, localhub: LocalHub, tmp_path: Path
) -> None:
    localhub.faults.add("status", status=500, times=99)
    command = ["bundle", "--source", "hub", "--output", str(tmp_path / "kernels.zip")]
    assert "Connection refused" in refused(run_python, 1, *command, **DEAD)
    assert "500 Internal Server Error" in refused(run_python, 1, *command, **localhub.environment(tmp_path / "home"))
    assert not (tmp_path / "kernels.zip").exists()


def test_what_cannot_be_written_or_read_is_named() -> None:
    with pytest.raises(RefusedError, match=r"^--output /dev/full cannot be written: No space left on device$"):
        write_file("--output", Path("/dev/full"), "a report")
    with pytest.raises(RefusedError, match=r"^/proc/kernels.zip cannot be written: "):
        bundles.write(Path("/proc/kernels.zip"))
    with pytest.raises(RefusedError, match=r"^/proc/self/mem cannot be read: Input/output error$"):
        bundles.install(Path("/proc/self/mem"))
