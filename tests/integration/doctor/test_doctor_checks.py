"""Single checks of doctor, each with its own probe: quicker than whole examinations."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import transformers
from transformers.utils import import_utils

from kernels_ext_npu.catalogue import REPOSITORIES, in_words
from kernels_ext_npu.doctor import examination, findings, installed_packages
from kernels_ext_npu.doctor.checks import device, kernel_files, libraries, python_and_torch, register_effect
from kernels_ext_npu.doctor.findings import Verdict
from kernels_ext_npu.doctor.observations import Outcome, run
from kernels_ext_npu.doctor.probes import copies_and_cache, hardware_and_cann, swapped_and_compared, torch_npu_alone
from kernels_ext_npu.machine import description
from kernels_ext_npu.machine.cann_releases import parse_release, sentences
from tests.integration.doctor import doctor_faults as faults


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the software device has set in this process is none of a user's machine."""
    for name in ("ASCEND_HOME_PATH", "ASCEND_OPP_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder whose packages come before the installed ones."""
    monkeypatch.syspath_prepend(tmp_path / "site")
    return tmp_path / "site"


# ---- probes ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("torch", "failure"),
    [
        ("import os; os._exit(7)", "import torch: the process ended by itself with code 7"),
        ("import sys; sys.exit('enough')", "import torch: SystemExit: enough"),
        ("raise OSError('libc10.so: nothing')", "import torch: OSError: libc10.so: nothing"),
    ],
)
def test_what_a_probe_dies_of_is_told(packages: Path, torch: str, failure: str) -> None:
    faults.module(packages, "torch", torch, "2.13.0")
    outcome = run(torch_npu_alone, 60)
    assert outcome.failure == failure
    finding = python_and_torch.torch(faults.observed(torch=outcome))
    assert finding.verdict is Verdict.PROBLEM
    assert "torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu" in finding.commands[0]


def test_nothing_is_left_of_a_probe_that_hangs(packages: Path, tmp_path: Path) -> None:
    """Neither of its processes comes to its end; a machine that is busy takes its time to end one that is killed."""
    code = f"import os, time; os.fork(); print(os.getpid(), file=open({str(tmp_path)!r} + f'/{{os.getpid()}}', 'w'));"
    code += f"time.sleep(60); open({str(tmp_path / 'ended')!r}, 'w')"
    faults.module(packages, "torch", code)
    started: list[int] = []
    for limit in (2, 10, 60):  # seconds: a machine that is busy may take the first to start Python
        if len(started) < 2:
            outcome = run(torch_npu_alone, limit)
            assert outcome.hung
            started = [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]
    assert len(started) >= 2
    assert re.fullmatch(r"import torch: no end after \d+ s", outcome.failure)
    while any(map(is_running, started)):
        time.sleep(0.1)
    assert not (tmp_path / "ended").exists()


def is_running(process: int) -> bool:
    """Tell whether a process is there that has not ended, whether or not its parent has asked for it yet."""
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_cuda_build_that_cannot_even_be_imported_is_named(packages: Path) -> None:
    faults.module(packages, "torch", "raise ImportError('libcudart.so.13: cannot open shared object file')", "2.13.0")
    version = "from typing import Optional\n__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\n"
    (packages / "torch" / "version.py").write_text(version)
    finding = python_and_torch.torch(faults.observed(torch=run(torch_npu_alone, 60)))
    assert finding.summary == "2.13.0 is a build for CUDA 13.0"
    assert finding.see == python_and_torch.WRONG_BUILD


def test_an_interrupt_does_not_wait_for_what_hangs(tmp_path: Path) -> None:
    touch = [f"open({str(tmp_path / name)!r}, 'w')" for name in ("started", "ended")]
    faults.module(tmp_path, "torch", f"import time; {touch[0]}; time.sleep(60); {touch[1]}")
    code = "from kernels_ext_npu.cli import app; app(['doctor'])"
    paths = os.pathsep.join(map(str, (tmp_path, *sys.path)))
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": paths})
    while not (tmp_path / "started").exists():
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=300) == 130
    assert not (tmp_path / "ended").exists()


def test_what_libraries_print_is_no_result(packages: Path) -> None:
    source = "import os; os.write(1, b'{\"facts\": {\"devices\": 5}}\\n'); __version__ = '2.13.0'; version = None"
    faults.module(packages, "torch", source)
    assert "devices" not in run(torch_npu_alone, 60).facts


# ---- packages --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        ("Name: kernels\n", "its metadata names no version"),
        ("Name: kernels\nVersion: newest\n", "its metadata names the version 'newest', which is none"),
        (None, "its module is in "),
    ],
)
def test_broken_metadata_is_told(monkeypatch, tmp_path: Path, metadata: str | None, told: str) -> None:
    faults.module(tmp_path, "kernels", "")
    if metadata is not None:
        faults.dist_info(tmp_path, "kernels", "1", metadata)
        monkeypatch.syspath_prepend(tmp_path)
    else:
        monkeypatch.setattr("sys.path", [str(tmp_path)])
    finding = libraries.kernels(faults.observed())
    assert finding.verdict is Verdict.PROBLEM
    assert finding.summary.startswith(told)
    assert finding.commands == ("pip install --force-reinstall --no-deps 'kernels<0.18,>=0.17.2'",)


def test_versions_outside_of_a_window_or_of_what_was_tested(packages: Path) -> None:
    faults.module(packages, "kernels", "", "0.16.2")
    faults.module(packages, "accelerate", "", "1.9.0")
    seen = faults.observed()
    finding = libraries.kernels(seen)
    assert finding.verdict is Verdict.PROBLEM
    lowest, beyond = import_utils.KERNELS_MIN_VERSION, import_utils.KERNELS_MAX_VERSION
    assert finding.summary == f"0.16.2, and transformers {transformers.__version__} takes >= {lowest}, < {beyond}"
    assert finding.commands == (f"pip install 'kernels>={lowest},<{beyond}'",)
    (accelerate,) = [finding for finding in libraries.helpers(seen) if finding.verdict is Verdict.PROBLEM]
    assert accelerate.commands == ("pip install 'accelerate<2,>=1.10.1'",)
    shutil.rmtree(packages / "kernels-0.16.2.dist-info")
    faults.module(packages, "kernels", "", "0.17.9")
    assert libraries.kernels(faults.observed()).verdict is Verdict.OK


def test_another_transformers_is_warned_of_and_its_own_window_is_taken(monkeypatch, packages: Path) -> None:
    faults.module(packages, "transformers", "", "5.25.0")
    (packages / "transformers" / "utils").mkdir()
    window = 'KERNELS_MIN_VERSION = "0.18.2"\nKERNELS_MAX_VERSION = "0.19.0"\nimport nowhere\n'
    (packages / "transformers" / "utils" / "import_utils.py").write_text(window)
    seen = faults.observed()
    assert libraries.transformers(seen).verdict is Verdict.WARNING
    kernels = libraries.kernels(seen)
    assert "takes >= 0.18.2, < 0.19.0" in kernels.summary
    assert kernels.commands[-1] == "pip install 'transformers==5.22.2' 'kernels==0.17.2'"
    monkeypatch.setenv("USE_HUB_KERNELS", "off")
    finding = libraries.transformers(faults.observed())
    assert (finding.verdict, finding.commands) == (Verdict.PROBLEM, ("unset USE_HUB_KERNELS",))


def test_what_a_package_asks_for_and_does_not_get(packages: Path) -> None:
    asks = "Name: torch_npu\nVersion: 2.13.0\nRequires-Dist: torch==2.12.0.*\nRequires-Dist: pyyaml>=99\n"
    faults.module(packages, "torch_npu", "import yaml.nowhere", "2.13.0", asks)
    seen = faults.observed(torch=Outcome({"torch": "2.13.0+cpu", "passed": ["import torch"], "xpu": None}, failure="x"))
    finding = libraries.requirements(seen)
    assert finding.details[0].startswith("torch_npu asks for pyyaml>=99: found ")
    finding = python_and_torch.torch_npu(seen)
    assert finding.verdict is Verdict.PROBLEM
    assert "2.13.0 asks for torch==2.12.0.*, and torch is 2.13.0+cpu" in finding.details
    assert finding.commands[0] == "pip install --no-deps torch_npu==2.13.0"


def test_requirements_of_the_package_are_the_declared_ones() -> None:
    from test_packaging import RANGES

    for name, asked in libraries.REQUIRED.items():
        assert RANGES[name].specifier == asked
    assert installed_packages.read("surely-not-installed").installed is False


# ---- CANN and devices ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("version", "verdict", "words"),
    [
        ("8.2.RC1", Verdict.OK, "8.2.RC1 in {home}; kernels reads 8.2"),
        ("9.1.0", Verdict.OK, "9.1.0 in {home}; kernels reads 9.1"),
        ("8.12.0", Verdict.WARNING, "8.12.0 in {home}, which kernels reads as 8.1"),
        ("10.0.0", Verdict.PROBLEM, "version 10.0.0 in {home}, and kernels cannot read it"),
        (None, Verdict.PROBLEM, "version unknown ('not known') in {home}, and kernels cannot read it"),
    ],
)
def test_versions_of_cann(monkeypatch, tmp_path: Path, version: str | None, verdict: Verdict, words: str) -> None:
    home = faults.cann(tmp_path / "toolkit" / "latest", version)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(home))
    finding = device.cann(faults.observed(disk=run(hardware_and_cann, 60)))
    assert (finding.verdict, finding.summary) == (verdict, words.format(home=home))
    if verdict is Verdict.OK:  # and it is told what a later release would bring
        assert finding.details == tuple(sentences(parse_release(version)))
    if verdict is Verdict.PROBLEM:
        assert "InvalidVersion" in str(finding.advice)
        assert finding.see == "InvalidVersion: Invalid version"


def test_what_kernels_reads_is_what_it_reads(monkeypatch) -> None:
    """The rule of this project, and the code of `kernels`."""
    from kernels import backends

    for found in ("8.2.RC1", "8.3.RC1.alpha003", "9.1.0-beta.1", "10.0.0", "8.12.0", "not known", "", "8"):
        monkeypatch.setattr("torch_npu.utils.collect_env.get_cann_version", lambda found=found: found)
        try:
            expected = str(backends._backend().version)
        except (ValueError, IndexError):
            expected = None
        assert device.as_kernels_reads(found) == expected, found


def test_a_folder_of_cann_that_does_not_exist(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "gone"))
    finding = device.cann(faults.observed(disk=run(hardware_and_cann, 60)))
    assert finding.verdict is Verdict.PROBLEM
    assert f"ASCEND_HOME_PATH is {tmp_path}/gone, which is no folder" == finding.summary


@pytest.mark.software
def test_torch_npu_with_cann_but_without_a_device(monkeypatch, tmp_path: Path) -> None:
    """The real wheel, with libraries in place of CANN's: here the runtime tells that there is no device."""
    environment = faults.played_cann(tmp_path, "10.0.0", devices=0)
    for name, value in (environment | {"ASCEND_RT_VISIBLE_DEVICES": "9"}).items():
        monkeypatch.setenv(name, value)
    seen = faults.observed(disk=run(hardware_and_cann, 60), torch=run(torch_npu_alone, 60))
    assert seen.torch.failure is None
    assert python_and_torch.torch_npu(seen).verdict is Verdict.OK
    finding = device.device(seen)
    assert (finding.verdict, finding.summary) == (Verdict.PROBLEM, "none visible to torch_npu")
    assert finding.commands == ("unset ASCEND_RT_VISIBLE_DEVICES",)
    assert "one digit before the dot" in str(device.cann(seen).advice)
    assert seen.expects_a_card
    assert not examination._is_usable(seen)


def test_signs_of_a_card_without_a_device_node(tmp_path: Path) -> None:
    failed = Outcome(failure="import torch_npu: x", errors=(f"ImportError: {faults.NO_CANN}",))
    seen = faults.observed(disk=Outcome(description.signs(faults.card(tmp_path / "a"))), torch=failed)
    finding = device.device(seen)
    assert finding.verdict is Verdict.PROBLEM
    assert finding.summary == "a card is meant to be here, but there is no /dev/davinci*"
    assert finding.details == ("there is 1 on the PCI bus (0000:c1:00.0)", "there is the driver (25.2.0)")
    assert "--device /dev/davinci0" in str(finding.advice)
    nodes = faults.observed(disk=Outcome(description.signs(faults.card(tmp_path / "b", nodes=2))), torch=failed)
    assert nodes.nodes == ["/dev/davinci0", "/dev/davinci1"]
    assert device.device(nodes).verdict is Verdict.NOT_CHECKED  # torch_npu is the problem there
    assert device.cann(nodes).verdict is Verdict.PROBLEM


def test_a_tool_of_the_driver_that_fails(monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "npu-smi").write_text("#!/bin/sh\necho 'dcmi model initialized failed. ret is -8005'\nexit 255\n")
    (tmp_path / "npu-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    disk = run(hardware_and_cann, 60)
    finding = device.device(faults.observed(disk=disk, torch=Outcome(failure="import torch_npu: x")))
    assert finding.verdict is Verdict.PROBLEM
    assert finding.summary == "npu-smi info: it ended with 255: dcmi model initialized failed. ret is -8005"


@pytest.mark.software
def test_a_machine_without_a_compiler_has_no_software_device(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "/nonexistent")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    failed = Outcome({"passed": ["import torch"]}, failure="x", errors=(f"ImportError: {faults.NO_CANN}",))
    seen = faults.observed(torch=failed, use=run(swapped_and_compared, 60, source="bundled"))
    finding = device.device(seen)
    assert finding.verdict is Verdict.PROBLEM
    assert "no software device: ImportError: softnpu builds a small library" in finding.summary
    assert "apt-get install gcc" in finding.commands[0]
    for check in (python_and_torch.torch_npu, register_effect.register_takes_effect):
        assert check(seen).verdict is Verdict.NOT_CHECKED  # told once


# ---- the kernels on disk ---------------------------------------------------------------------------------------------
def test_changed_kernels_and_a_source_that_is_none(tmp_path: Path) -> None:
    for name in REPOSITORIES:
        shutil.copytree(Path(__file__).parents[3] / name / "build", tmp_path / name / "build")
    (tmp_path / "RMSNorm" / "build" / "torch-npu" / "layers.py").write_text("import os")
    found = run(copies_and_cache, 60, source=str(tmp_path), torch="2.8.0", cann="8.2", arch="aarch64")
    seen = faults.observed(repositories=found)
    seen.source = str(tmp_path)
    finding = kernel_files.intact(seen)
    assert finding.verdict is Verdict.PROBLEM
    assert finding.details == ("RMSNorm/build/torch-npu/layers.py: changed, its digest differs",)
    (variant,) = kernel_files.variants(seen)
    assert variant.summary == f"torch28-cxx11-cann82-aarch64-linux, of all {in_words()} repositories"
    shutil.rmtree(tmp_path / "RoPE")
    seen.repositories = run(copies_and_cache, 60, source=str(tmp_path), torch="2.8", cann="8.2", arch="aarch64")
    assert f"{tmp_path} has no RoPE/build." in kernel_files.intact(seen).summary


@pytest.mark.parametrize("variable", ["HF_HOME", "KERNELS_CACHE"])
def test_a_cache_that_cannot_be_used(monkeypatch, tmp_path: Path, variable: str) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(variable, str(tmp_path / "file") if variable == "HF_HOME" else "~/kernels")
    seen = faults.observed(repositories=run(copies_and_cache, 60, source="hub", torch="2.13", cann=None, arch="x"))
    finding = kernel_files.cache(seen)
    assert finding.verdict is Verdict.WARNING  # register() does not need it
    assert finding.summary.startswith("KERNELS_CACHE is '~/kernels'" if variable != "HF_HOME" else f"{tmp_path}/file ")
    seen.source = "hub"
    assert kernel_files.cache(seen).verdict is Verdict.PROBLEM


# ---- conclusions -----------------------------------------------------------------------------------------------------
def test_a_model_that_computes_something_else_is_a_problem() -> None:
    facts = {"software": True, "kept": [], "summary": "all", "difference": 0.5, "agrees": False, "taken": {}}
    assert register_effect.register_takes_effect(faults.observed(use=Outcome(facts))).verdict is Verdict.PROBLEM
    kept = facts | {"agrees": True, "kept": ["model.norm (Norm): somebody else's"]}
    finding = register_effect.register_takes_effect(faults.observed(use=Outcome(kept)))
    assert (finding.verdict, finding.details) == (Verdict.WARNING, ("model.norm (Norm): somebody else's",))


def test_a_check_that_fails_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(seen):
        return {}["nothing"]

    monkeypatch.setitem(examination.CHECKS, "mine", broken)
    (finding,) = examination._conclude("mine", faults.observed())
    assert finding.verdict is Verdict.WARNING
    assert "KeyError: 'nothing'" in finding.summary


@pytest.mark.parametrize(("errors", "advice"), [
    (["KeyError: '`a/b` is not a valid attention implementation registered in the `AttentionInterface`'"], "regis"),
    (["RuntimeError: aclnnScoreV3 or aclnnScoreV3GetWorkspaceSize not in libopapi.so, or libopapi.so not found."],
     "package of operators"),
    # a cause before what was made of it
    (["RuntimeError: Failed to load the backend extension: torch_npu.", "ModuleNotFoundError: No module named 'yaml'"],
     "pip install pyyaml"),
])  # fmt: skip
def test_errors_are_known(errors: list[str], advice: str) -> None:
    known = findings.explain(errors)
    assert known is not None
    assert advice in f"{known.advice} {known.commands}"


# ---- bitsandbytes ----------------------------------------------------------------------------------------------------
def test_bitsandbytes_is_told_where_it_is_installed(packages: Path) -> None:
    faults.module(packages, "bitsandbytes", "", "0.50.2")
    seen = faults.observed(use=Outcome({"bitsandbytes": None}))
    (finding,) = libraries.bitsandbytes(seen)
    assert (finding.verdict, finding.summary) == (Verdict.OK, "0.50.2, with operators for the NPU")
    (finding,) = libraries.bitsandbytes(faults.observed(use=Outcome({"bitsandbytes": "it cannot be imported: why"})))
    assert finding.verdict is Verdict.WARNING
    assert "it cannot be imported: why" in finding.summary
    (finding,) = libraries.bitsandbytes(faults.observed())
    assert finding.verdict is Verdict.NOT_CHECKED


def test_bitsandbytes_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed_packages, "read", lambda name: installed_packages.Package(name, None))
    assert libraries.bitsandbytes(faults.observed()) == []
