"""make test-variants: what it proves where, what it says when something is missing, and that a broken kernel fails."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from pathlib import Path

import build
import pytest
from rich.console import Console

from kernels_ext_npu.catalogue import REPOSITORIES
from kernels_ext_npu.distribution.variants import NOARCH, names, repositories
from proving import ProvingError, interpreters, pairs, report
from proving.interpreters import Interpreter
from proving.packages import Packages
from proving.pairs import Proof
from proving.run import Outcome, prove
from strict import Strict, strict_variants

VARIANTS = [
    Strict("torch26-cxx11-cann82-aarch64-linux", "2.6.0", "8.2.RC1"),
    Strict("torch27-cxx11-cann82-aarch64-linux", "2.7.1", "8.2.RC1"),
    Strict("torch27-cxx11-cann83-aarch64-linux", "2.7.1", "8.3.RC1"),
    Strict("torch27-cxx11-cann85-aarch64-linux", "2.7.1.post2", "8.5.0"),
]
OWN = Proof("torch-npu", "2.13.0", "2.13.0", "9.1.0")
SCRIPT = str(build.ROOT / "scripts" / "prove.py")


# ---- what is proven where --------------------------------------------------------------------------------------------
def test_without_pairs_each_variant_is_proven_on_what_it_names_and_then_newer_releases() -> None:
    found, strict = pairs.proofs(strict_variants(build.ROOT)), names(build.ROOT)[len(NOARCH) :]
    assert [proof.variant for proof in found[: len(strict)]] == [*strict]
    assert (found[0].torch, found[0].torch_npu, found[0].cann) == ("2.6.0", "2.6.0", "8.2.RC1")
    assert [proof.name for proof in found[len(strict) :]] == [
        "torch211-cxx11-cann91-aarch64-linux 2.11.0.post3", "torch212-cxx11-cann91-aarch64-linux 2.12.0.post3",
        "torch-npu 2.13.0", "torch-npu 2.14.0",
    ]  # fmt: skip
    assert len({proof.name for proof in found}) == len(found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2.7.1", [("torch27-cxx11-cann82", "2.7.1", "2.7.1"), ("torch27-cxx11-cann83", "2.7.1", "2.7.1")]),
        # of a release that none names, all of its torch
        ("2.6.0=2.6.0.post5", [("torch26-cxx11-cann82", "2.6.0", "2.6.0.post5")]),
        ("2.6.1", [("torch26-cxx11-cann82", "2.6.1", "2.6.1")]),
        ("2.5.1", [("torch-npu", "2.5.1", "2.5.1")]),
        (
            " 2.6.0  2.7.1=2.7.1.post2 ",
            [("torch26-cxx11-cann82", "2.6.0", "2.6.0"), ("torch27-cxx11-cann85", "2.7.1", "2.7.1.post2")],
        ),
    ],
)
def test_pairs_choose_the_variants_that_name_them(text: str, expected: list) -> None:
    found = pairs.proofs(VARIANTS, text)
    assert [(p.variant.removesuffix("-aarch64-linux"), p.torch, p.torch_npu) for p in found] == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2.8.0=2.7.1", "does not extend torch 2.8.0"),
        ("new", "a pair is TORCH=TORCH_NPU"),
    ],
)
def test_what_is_no_pair_is_said(text: str, message: str) -> None:
    with pytest.raises(ProvingError, match=message):
        pairs.proofs(VARIANTS, text)


# ---- what is missing -------------------------------------------------------------------------------------------------
@pytest.mark.skipif(platform.machine() == "aarch64", reason="nothing is emulated there")
@pytest.mark.parametrize("missing", [interpreters.QEMU, interpreters.COMPILER])
def test_a_missing_tool_is_named_with_how_to_get_it(run_python, tmp_path: Path, missing: str) -> None:
    tools = {"apt-get", "dpkg-deb", interpreters.QEMU, interpreters.COMPILER} - {missing}
    for tool in tools:
        (tmp_path / tool).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / tool).chmod(0o755)
    result = run_python(None, SCRIPT, check=False, PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert result.returncode == 2
    assert f"it has no {missing}" in result.stderr
    assert "apt-get install qemu-user-static gcc-aarch64-linux-gnu" in result.stderr
    assert not (tmp_path / "cache").exists()


@pytest.mark.skipif(platform.machine() == "aarch64", reason="nothing is emulated there")
def test_what_apt_cannot_do_is_said_and_leaves_nothing(monkeypatch, tmp_path: Path) -> None:
    for tool in (interpreters.QEMU, interpreters.COMPILER, "apt-get", "dpkg-deb"):
        (tmp_path / tool).write_text("#!/bin/sh\necho no such host >&2\nexit 100\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(ProvingError, match="no such host"):
        interpreters.find(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_aarch64_machine_runs_its_own_python(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(sys, "version_info", (3, 11, 4))
    found = interpreters.find(tmp_path)
    assert (found.command, found.version) == ((sys.executable,), "3.11")
    assert found.environment == {"PYTHONPYCACHEPREFIX": str(tmp_path / "bytecode")}
    monkeypatch.setattr(sys, "version_info", (3, 13, 1))
    with pytest.raises(ProvingError, match=r"this is Python 3\.13; .* make test-variants PYTHON=python3\.11"):
        interpreters.find(tmp_path)


def test_a_release_that_does_not_exist_leaves_nothing(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ProvingError, match=r"pip has no torch_npu==2\.6\.99 for Python 3\.11 on aarch64"):
        Packages(tmp_path, "3.11").release("torch_npu", "2.6.99")
    assert list((tmp_path / "python3.11").iterdir()) == []


# ---- what a run says, on the releases that are installed here --------------------------------------------------------
@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The project, for a run that changes it."""
    for name in ("integration", "softnpu", "tests", *(path.name for path in repositories(build.ROOT))):
        shutil.copytree(build.ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "variants.toml"):
        shutil.copy(build.ROOT / name, tmp_path)
    return tmp_path


def run(root: Path, *tests: str, proof: Proof = OWN) -> Outcome:
    interpreter = Interpreter((sys.executable,), "3.11", {"PYTHONDONTWRITEBYTECODE": "1"})
    return prove(proof, interpreter, [], root, *tests)


@pytest.mark.long
def test_a_run_reports_what_it_compared_each_layer_that_fails_and_each_other_variant(clone: Path, capsys) -> None:
    source = clone / "RMSNorm" / "build" / "torch-npu" / "functional.py"
    text = source.read_text()
    assert text.count("npu_rms_norm(hidden_states, weight, eps)[0]") == 1
    source.write_text(text.replace("(hidden_states, weight, eps)[0]", "(hidden_states, weight, eps)[0] * 1.001"))
    chosen = "RMSNorm-torch.float32 or swiglu-torch.float32 or test_of_all_variants"
    outcome = run(clone, "tests/variants", "-k", chosen, proof=Proof("torch26-x", "2.6.0", "2.6.0", "8.2.RC1"))
    others = {f"test_of_all_variants_the_one_for_this_machine_is_taken[{name}]" for name in REPOSITORIES}
    failed = {line.partition(":")[0] for line in outcome.failures}
    assert failed - others == {"test_a_layer_is_what_float64_gives[RMSNorm-torch.float32]"}
    assert others < failed
    assert outcome.checks == 3
    assert 0 < outcome.largest["functions float32"] < 1e-6 < outcome.largest["layers float32"]
    report.announce(outcome, Console(), clone / "logs")
    assert "FAILED" in capsys.readouterr().out
    assert "AssertionError" in (clone / "logs" / "torch26-x 2.6.0.log").read_text()


def test_a_run_that_does_not_start_is_a_failure_with_its_output(tmp_path: Path) -> None:
    outcome = run(tmp_path, "nowhere.py")
    (failure,) = outcome.failures
    assert "pytest ended with 4" in failure
    assert "nowhere.py" in failure


def test_what_holds_on_what_a_variant_names_is_recorded_and_the_rest_stays(tmp_path: Path) -> None:
    (tmp_path / "tests" / "data").mkdir(parents=True)
    lines = [f'{v.name} = {{ torch_npu = "{v.torch_npu}", cann = "{v.cann}" }}' for v in VARIANTS]
    (tmp_path / "variants.toml").write_text("\n".join(lines))
    first, second, third, *_ = pairs.proofs(VARIANTS)
    largest = {"layers float32": 1.26e-7, "functions float32": 3e-7}
    report.write([Outcome(first, 9, (), 12.4, largest, "")], tmp_path)
    elsewhere = pairs.proofs(VARIANTS, "2.6.0=2.6.0.post5")[0]
    failed = Outcome(third, 8, ("why",), 11.0, {}, "")
    report.write([Outcome(second, 8, (), 11.0, {}, ""), Outcome(elsewhere, 1, (), 1.0, {}, ""), failed], tmp_path)
    record = json.loads((tmp_path / report.RECORD).read_text())
    assert list(record) == [first.name, second.name]
    assert record[first.name]["largest"] == {"functions float32": 3e-7, "layers float32": 1.3e-7}
    assert (record[first.name]["torch_npu"], record[first.name]["checks"]) == ("2.6.0", 9)


def test_other_tests_are_no_record(run_python) -> None:
    result = run_python(None, SCRIPT, "--record", "tests/rmsnorm", check=False)
    assert result.returncode == 2
    assert "leave out either it or the tests" in result.stderr
