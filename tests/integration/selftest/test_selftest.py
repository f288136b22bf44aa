"""``kernels-ext-npu selftest``: it finds faults, crashes and hangs, and its report names nobody."""

import getpass
import io
import json
import math
import re
import shutil
import uuid
from itertools import product
from pathlib import Path

import pytest
import torch
from build import ROOT
from rich.console import Console
from typer.testing import CliRunner

from kernels_ext_npu import cli
from kernels_ext_npu.catalogue import REPOSITORIES
from kernels_ext_npu.distribution import sources
from kernels_ext_npu.environment import RefusedError
from kernels_ext_npu.measuring.costs import host_waits, profiled_waits
from kernels_ext_npu.selftest import comparing, functions, pieces, result_report, runner
from kernels_ext_npu.selftest.cases import Layer
from kernels_ext_npu.selftest.layers.layer_cases import CASES
from kernels_ext_npu.selftest.limits import LIMITS
from kernels_ext_npu.selftest.operators import OPERATORS
from planting.faults import FAULTS, VARIANT, Fault

CRASH = Fault("Activation", "functional.py", "", '    _check("quick_gelu", x)', "    import os\n\n    os.abort()")
HANG = Fault("Activation", "functional.py", "", '    _check("gelu_tanh", x)', "    import time\n\n    time.sleep(600)")


def copied(folder: Path, *faults: Fault, repositories=REPOSITORIES) -> Path:
    """Copy the variant of this machine of some repositories, and plant faults."""
    for name in repositories:
        shutil.copytree(ROOT / name / "build" / VARIANT, folder / name / "build" / VARIANT)
        metadata = folder / name / "build" / VARIANT / "metadata.json"
        described = json.loads(metadata.read_text())
        # a name of its own: what is loaded of the true kernel in this process is not taken for it
        metadata.write_text(json.dumps(described | {"id": f"{described['id']}_{uuid.uuid4().hex}"}))
    for fault in faults:
        fault.plant(folder)
    return folder


def seen(fault: Fault, folder: Path) -> list[str]:
    """The tests of the repository that see a fault, up to the first."""
    copied(folder, fault, repositories=[fault.repository])
    kernel = sources.load_package(folder, fault.repository)
    cases = [case for case in (*functions.FUNCTIONS, *CASES) if case.repository == fault.repository]
    cases.sort(key=lambda case: (case.at != "", isinstance(case, Layer)))
    # one per cent of all values is more than is allowed in the first two; bfloat16 alone has operators of its own
    for dtypes in ((torch.float32, torch.float16), (torch.bfloat16,)):
        for case, dtype in product(cases, dtypes):
            if not case.compare(kernel, dtype).largest <= comparing.TOLERANCE[dtype]:
                return [case.title]
    return []


def test_every_function_and_layer_is_tested_in_three_dtypes() -> None:
    ids = pieces.pieces(quick=False)
    assert len(ids) == 3 * (len(functions.FUNCTIONS) + len(CASES)) + 10 + len(LIMITS) + len(OPERATORS)
    quick = pieces.pieces(quick=True)
    assert set(quick) < set(ids)
    assert {identity.split(" | ")[0] for identity in quick} == {*REPOSITORIES, "models"}


# a graph of torch.compile, and products of 2**23 elements: the self-test calls neither
BEYOND = {"where it is written by torch", "a product that casts nothing large", "a gradient that casts nothing large"}
KERNEL_FAULTS = [fault for fault in FAULTS if fault.repository in REPOSITORIES]
# one forward and one backward each
SHOWN = {(fault.repository, "gradient" in fault.what): fault for fault in KERNEL_FAULTS}


def test_all_repositories_have_faults_forward_and_backward() -> None:
    assert set(SHOWN) == set(product(REPOSITORIES, (False, True)))
    for fault in FAULTS:
        assert all(fault.before in path.read_text() for path in fault.paths(ROOT)), fault.name
        assert fault.paths(ROOT), fault.name


@pytest.mark.parametrize("fault", [
    pytest.param(fault, id=fault.name, marks=() if fault in SHOWN.values() else pytest.mark.long)
    for fault in KERNEL_FAULTS if fault.what not in BEYOND
])  # fmt: skip
def test_a_fault_of_one_per_cent_is_seen(tmp_path, fault: Fault) -> None:
    assert seen(fault, tmp_path)


def test_kernels_without_faults_pass(tmp_path) -> None:
    """In all three dtypes: a case that fails by itself would see every fault."""
    same = Fault("CrossEntropy", "head_logits.py", "", "largest + total.log()", "total.log() + largest")
    assert seen(same, tmp_path) == []


@pytest.mark.parametrize(("value", "larger"), [(1.02, True), (math.nan, True), (1.0 + 1e-7, False)])
def test_differences_are_relative_and_a_nan_is_one(value: float, larger: bool) -> None:
    exact = [torch.ones(2, dtype=torch.float64)]
    difference = comparing.difference(comparing.Results([torch.tensor([1.0, value])], []), comparing.Results(exact, []))
    assert (difference.largest > comparing.TOLERANCE[torch.float32]) == larger


@pytest.mark.long
def test_a_crash_has_a_name_and_the_rest_goes_on(tmp_path) -> None:
    """The process that goes on is another one, which does what the first did not."""
    told = []
    outcome = runner.run(
        str(copied(tmp_path, CRASH)),
        quick=True,
        only=["gelu, float32", "swiglu, float32"],
        tell=lambda done, total, what: told.append((done, total, what)),
    )
    failed = {identity: row["error"] for identity, row in outcome.rows.items() if not row["agrees"]}
    assert failed == {"Activation | quick_gelu | float32": "its process died of SIGABRT"}
    assert len(outcome.ids) == 3 + 1 == len(told)
    assert told[-1] == (3, 4, "SwiGLU | clipped_swiglu | float32")
    assert not outcome.agrees


@pytest.mark.long
def test_a_hang_is_ended_and_the_rest_goes_on(tmp_path) -> None:
    outcome = runner.run(str(copied(tmp_path, HANG)), quick=True, only=["Activation, "], limit=5.0)
    failed = {identity: row["error"] for identity, row in outcome.rows.items() if not row["agrees"]}
    assert set(failed.values()) == {"did not end within 5 s"}
    assert {identity.split(" | ")[1] for identity in failed} == {"gelu_tanh"}
    assert len(outcome.rows) == 4


@pytest.mark.long
def test_the_command_agrees_here_and_its_report_names_nobody(tmp_path) -> None:
    path = tmp_path / "report.json"
    result = CliRunner().invoke(cli.app, ["selftest", "--output", str(path)], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert "On the software device, no card: all " in result.output
    assert "allowed: float32 4.0e-06, float16 3.9e-03, bfloat16 3.1e-02, models 1.0e-05" in words(result.output)
    written = path.read_text()
    assert str(Path.home()) not in written
    assert "/" not in written.replace("torch_npu", "")
    found = json.loads(written)
    assert found["machine"]["device"] == "software device"
    assert all(row["agrees"] for row in found["results"])
    others = [row for row in found["results"] if row["of"] not in ("limits", "operators")]
    assert all(row["backward"] >= 0 and row["peak_bytes"] >= 0 for row in others)


def words(shown: str) -> str:
    """What was shown, however it was wrapped."""
    return " ".join(shown.split())


def test_the_table_says_what_its_numbers_are_and_of_which_machine() -> None:
    outcome = runner.Outcome(quick=True, ids=["RMSNorm | rms_norm | float32", "models | Qwen3 | float32"])
    row = {"forward": 1e-8, "backward": 2e-8, "tolerance": 4e-6, "agrees": True, "peak_bytes": 0}
    outcome.rows = {outcome.ids[0]: row, outcome.ids[1]: row | {"tolerance": 1e-5, "waits": [1, 2]}}
    outcome.machine = {"device": "card", "chip": "Ascend910B4", "driver": None, "cann": "8.2.RC1", "torch": "2.8.0"}
    console = Console(width=80, file=io.StringIO())
    result_report.show(console, outcome)
    said = words(console.file.getvalue())
    assert "from float64 on the host, of models from their originals; allowed: float32 4.0e-06, models 1.0e-05." in said
    assert "chip Ascend910B4, cann 8.2.RC1, torch 2.8.0 On Ascend910B4: all 2 agree." in said


@pytest.mark.long
@pytest.mark.parametrize(("source", "only", "said"), [
    ("bundled", "flux", "there is no test whose name has flux in it"),
    ("hub", "RMSNorm, ", r"the kernels cannot be loaded from the Hub: .*Connection refused"),
    ("bundle", "RMSNorm, ", 'did you mean "bundled"'),
])  # fmt: skip
def test_what_cannot_be_tested_is_said_once(monkeypatch, source: str, only: str, said: str) -> None:
    for name, value in {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RefusedError, match=said):
        runner.run(source, quick=True, only=[only])


def test_a_report_has_no_path_name_or_token(monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijkl")
    said = f"OSError: {Path.home()}/models/own.safetensors with hf_abcdefghijkl of ~/.cache/x, at {ROOT}/RMSNorm"
    outcome = runner.Outcome(quick=True, ids=["RMSNorm | rms_norm | float32"])
    outcome.rows = {outcome.ids[0]: {"agrees": False, "error": said, "forward": math.inf}}
    written = result_report.to_text(outcome)
    for secret in (str(Path.home()), "models/own", "hf_abcdefghijkl", ".cache", str(ROOT), f"/{getpass.getuser()}/"):
        assert secret not in written
    assert "own.safetensors" in written
    assert json.loads(written)["results"][0]["forward"] == "inf"


@pytest.mark.parametrize(
    "read",
    [lambda x: x.sum().item(), lambda x: bool(x.any()), lambda x: x.nonzero(), lambda x: x[x > 0], lambda x: x + 1],
    ids=["item", "bool", "nonzero", "mask", "nothing"],
)
def test_the_profiler_sees_the_waits_that_the_software_device_counts(read) -> None:
    x = torch.ones(4, device="npu")
    read(x)
    with host_waits() as counted:
        read(x)
    with profiled_waits() as profiled:
        read(x)
    assert profiled.number == counted.number


HARDWARE = (ROOT / "docs" / "hardware.md").read_text("utf-8")


@pytest.mark.software
def test_lines_that_decide_claims_are_lines_of_a_report() -> None:
    table = HARDWARE.partition("Of the selftest")[2].partition("Of the benchmark")[0]
    rows = [row.rpartition(" | ")[2] for row in table.splitlines() if row.startswith("|")]
    named = [line for row in rows for line in re.findall("`([^`]+)`", row)]
    known = {identity.replace(" | ", ", ") for identity in pieces.pieces(quick=False)}
    assert len(named) > 20
    assert set(named) <= known
    assert {line.partition(",")[0] for line in named} == {*REPOSITORIES, "models", "operators", "limits"}


@pytest.mark.software
def test_the_example_is_the_software_devices_and_as_a_report_is_now() -> None:
    example = json.loads((ROOT / "docs" / "selftest-software-device.json").read_text("utf-8"))
    assert example["machine"]["device"] == "software device"
    assert example["quick"]
    assert example["agrees"]
    ids = [" | ".join((row["of"], row["what"], row["dtype"])) for row in example["results"]]
    assert ids == list(pieces.pieces(quick=True))
