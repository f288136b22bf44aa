"""What doctor says of machines that work and of such that do not: what is wrong, what to do, and the exit code."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kernels_ext_npu import catalogue
from kernels_ext_npu.catalogue import in_words
from kernels_ext_npu.doctor import display
from kernels_ext_npu.doctor.checks import kernel_files
from kernels_ext_npu.doctor.findings import Verdict
from kernels_ext_npu.doctor.observations import run
from kernels_ext_npu.doctor.probes import copies_and_cache
from tests.integration.doctor import doctor_faults as faults
from tests.localhub import LocalHub
from tests.support.published_kernels import publish

ROOT = Path(__file__).resolve().parents[3]
COMMAND = "import sys; from kernels_ext_npu.cli import app; app(['doctor', *sys.argv[1:]])"
OFFLINE = {"HF_HUB_OFFLINE": "1"}
NOT_TAKEN = "Activation", "Linear", "LinearAttention"  # the model of register() calls nothing of them
TAKEN = [name for name in catalogue.REPOSITORIES if name not in NOT_TAKEN]


class Report:
    """The JSON report, by check."""

    def __init__(self, result: Any) -> None:
        self.exit_code, self.output, self.text = result.returncode, result.stdout, result.stderr
        assert "Traceback" not in self.text
        self.whole = json.loads(self.output)
        self.checks = {check["check"]: check for check in self.whole["checks"]}

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self.checks[name]

    def problems(self) -> set[str]:
        return {name for name, check in self.checks.items() if check["verdict"] == "problem"}


@pytest.fixture
def doctor(run_python, tmp_path: Path) -> Callable[..., Report]:
    """Runs the command with packages of a folder before the installed ones, in an empty folder and home."""

    def run(*arguments: str, site: Path | None = None, **environment: str) -> Report:
        paths = [site, ROOT, ROOT / "integration"] if site else [ROOT, ROOT / "integration"]
        environment = {"PYTHONPATH": ":".join(map(str, paths)), "HF_HOME": str(tmp_path / "hf")} | environment
        return Report(run_python(COMMAND, *arguments, "--json", check=False, **environment))

    return run


@pytest.mark.software
def test_a_machine_without_a_card_is_healthy_with_the_software_device(doctor, tmp_path: Path) -> None:
    secrets = {"HF_TOKEN": "hf_topsecret1234", "HTTPS_PROXY": "http://somebody:pass%20word@127.0.0.1:9"}
    endpoint = "https://mirror-user:mirror-password@127.0.0.1:9"
    report = doctor(HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="0", NO_PROXY="", **secrets)
    assert (report.exit_code, report.problems()) == (0, set())
    assert report["device"]["summary"] == "no NPU here: the software device is used"
    assert report["torch_npu"]["verdict"] == "ok"
    assert "takes effect on the software device: 9 of 9 norms, 1 of 1 gated MLPs" in report["register()"]["summary"]
    # what was loaded is what was foretold
    (taken,) = {Path(folder).name for folder in report["register()"]["facts"]["taken"].values()}
    kernels = {each.kernel.replace("-", "_") for each in catalogue.CATALOGUE if each.name in TAKEN}
    assert set(report["register()"]["facts"]["taken"]) == kernels
    assert report["variant"]["summary"] == f"{taken}, of all {in_words()} repositories"
    assert "aarch64-linux: CPU (aarch64) does not match" in report["variant"]["details"][-1] or taken != "torch-npu"
    # what stays to be done on every such machine, and a Hub that is not needed
    advised = ["python -m softnpu script.py", "export TORCH_DEVICE_BACKEND_AUTOLOAD=0"]
    assert report["autoload"]["commands"] == advised
    assert report["Hub"]["verdict"] == "warning"
    assert "through the proxy http://***@127.0.0.1:9" in report["Hub"]["summary"]
    for secret in ("topsecret", "pass%20word", "pass word", "mirror-password", "somebody"):
        assert secret not in report.output + report.text
    for width in (80, 120):
        console = Console(width=width, file=io.StringIO())
        display.show(console, report.whole)
        lines = console.file.getvalue().splitlines()
        assert max(len(line) for line in lines if not line.startswith("More: ")) <= width
        assert lines[-1] == "Healthy, on the software device: 2 warnings."
        assert {f"    {command}" for command in advised} <= set(lines)


@pytest.mark.long  # test_doctor_hub.py asks one in this process
@pytest.mark.software
def test_a_dead_hub_is_a_problem_for_who_wants_the_kernels_from_there(doctor) -> None:
    hub = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    report = doctor("--source", "hub", **hub)
    assert (report.exit_code, report.problems()) == (1, {"Hub"})
    assert report["register()"]["summary"].startswith("everything else works on the software device")


@pytest.mark.long  # test_doctor_hub.py asks one in this process, and the test above loads kernels
def test_the_kernels_of_a_hub_take_effect(doctor, localhub: LocalHub, tmp_path: Path, monkeypatch) -> None:
    localhub.trusted.add("kernels-ext-npu")
    publish(localhub, "card", variants="*")
    hub = localhub.environment(tmp_path / "user")
    report = doctor("--source", "hub", TORCH_DEVICE_BACKEND_AUTOLOAD="0", **hub)
    assert (report.exit_code, report.problems()) == (0, set())
    assert report["publisher"]["summary"] == "kernels-ext-npu is trusted by the Hub"
    assert report["Hub"]["summary"] == f"{localhub.url} answers and has the {in_words()} kernels"
    assert all(str(tmp_path / "user") in folder for folder in report["register()"]["facts"]["taken"].values())
    assert report["autoload"]["summary"] == "off, by TORCH_DEVICE_BACKEND_AUTOLOAD=0"
    # kernels has downloaded one variant of each that was taken, which is not enough offline
    for name, value in (hub | OFFLINE).items():
        monkeypatch.setenv(name, value)
    found = run(copies_and_cache, 60, source="hub", torch="2.13", cann="9.1", arch="x86_64")
    seen = faults.observed(repositories=found)
    seen.source = "hub"
    finding = kernel_files.cache(seen)
    assert finding.verdict is Verdict.PROBLEM
    assert f"incomplete: {', '.join(TAKEN)}; absent: {', '.join(NOT_TAKEN)}" in finding.summary
    assert finding.commands[0].startswith("hf download kernels-ext-npu/RMSNorm --repo-type kernel --revision v1")


def test_a_cuda_build_of_torch_is_named(doctor, tmp_path: Path) -> None:
    report = doctor(site=faults.cuda_torch(tmp_path / "site"), TORCH_DEVICE_BACKEND_AUTOLOAD="0", **OFFLINE)
    assert report.exit_code == 1
    assert report.problems() == {"torch"}
    assert "2.13.0+cu130 is a build for CUDA 13.0" in report["torch"]["summary"]
    (command,) = report["torch"]["commands"]
    assert command == (
        "pip install --force-reinstall --no-deps torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
    )
    assert "see torch above" in report["torch_npu"]["summary"]
    assert "Two accelerators cannot be used at the same time" in report["torch_npu"]["facts"]["errors"][0]


def test_torch_npu_without_the_libraries_of_cann_is_told_to_source_its_script(doctor, tmp_path: Path) -> None:
    """The real wheel on a machine with CANN on disk, for which no script was sourced."""
    home = faults.cann(tmp_path / "home" / "Ascend" / "ascend-toolkit" / "8.2.RC1", "8.2.RC1")
    compiler = {"CC": "/nonexistent", "XDG_CACHE_HOME": str(tmp_path / "cache")}  # no software device either
    report = doctor(HOME=str(tmp_path / "home"), TORCH_DEVICE_BACKEND_AUTOLOAD="0", **compiler, **OFFLINE)
    assert report.exit_code == 1
    assert report.problems() == {"torch_npu", "CANN", "device"}
    assert faults.NO_CANN in report["torch_npu"]["summary"]
    assert report["CANN"]["summary"] == "8.2.RC1 on disk, but its environment is not set up"
    assert report["CANN"]["commands"] == [f"source {home.parent}/set_env.sh"]
    assert report["CANN"]["facts"]["kernels_reads"] == "8.2"
    assert "unset the variables that begin with ASCEND_" in report["device"]["advice"]
    assert report["register()"]["verdict"] == "not checked"


def test_torch_that_kills_its_process_is_a_finding(doctor, tmp_path: Path) -> None:
    """Of every process that imports it: doctor itself does not."""
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    report = doctor(site=faults.module(tmp_path, "torch", crash, "2.13.0+cpu"), **OFFLINE)
    assert report.exit_code == 1
    assert report["torch"]["summary"] == "2.13.0+cpu cannot be imported: import torch: the process died of SIGSEGV"
    assert "Segmentation fault" in report["torch"]["facts"]["output"]
    assert report["torch"]["commands"]
    assert report["kernel files"]["verdict"] == "ok"  # what does not need torch is checked
    assert report["kernels"]["verdict"] == "ok"
    assert re.search("Not healthy: [12] problem", report.text)
