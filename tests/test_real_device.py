"""`make test` on a machine with a card: which tests skip there by themselves, and that the others run.

The software device plays the card. It says that it is real, and counts nothing, so that a test fails which reads its
counters and was not left out.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import softnpu
from softnpu import formulas
from tests.support import real_device

ROOT = Path(__file__).resolve().parent.parent
SOME = ("tests/integration/benchmarking/test_benchmark_times.py", "tests/linear/test_linear_functions.py",
        "tests/softnpu/test_counting.py")  # fmt: skip


def launches(call: Callable[[], object]) -> dict[str, int]:
    softnpu.reset_counters()
    call()
    return softnpu.counters()


def counts() -> None:
    assert launches(lambda: torch.ones(1, device="npu") + 1) == {"add": 1}


def counts_elsewhere(run_python: Callable[[str], object]) -> None:
    run_python("import softnpu; print(softnpu.counters())")


def counts_within() -> None:
    def call() -> None:
        assert softnpu.collectives() == {}

    call()


def uses_formulas() -> None:
    assert formulas.__name__


def reads_messages(said: str) -> None:
    assert said == "on the software device"


def compares_values() -> None:
    """Nothing of the software device: this text is no message that is read."""
    with softnpu.poisoned_memory():
        assert (torch.ones(1, device="npu") + 1).item() == 2


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        (counts, real_device.COUNTS),
        (functools.partial(counts), real_device.COUNTS),
        (counts_elsewhere, real_device.COUNTS),
        (counts_within, real_device.COUNTS),
        (uses_formulas, real_device.PARTS),
        (reads_messages, real_device.SAYS),
        (compares_values, None),
    ],
)
def test_what_a_test_reaches_says_whether_it_runs_on_a_card(test, reason: str | None) -> None:
    assert set(real_device.reasons(test)) == ({reason} if reason else set())


@pytest.mark.long
def test_tests_of_the_software_device_skip_on_a_card_and_the_others_run(run_python, tmp_path: Path) -> None:
    written = tmp_path / "results.xml"
    options = ["-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={written}", *SOME]
    ran = run_python(None, *options, directory=ROOT, **{real_device.AS_ON_A_CARD: "1"})
    assert "npu: real device" in ran.stdout
    cases = ElementTree.parse(written).getroot().iter("testcase")
    skipped, passed = {}, set()
    for case in cases:
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name', '').partition('[')[0]}"
        skip = case.find("skipped")
        if skip is None:
            passed.add(name)
        else:
            skipped[name] = skip.get("message")
    of_the_device = {reason for name, reason in skipped.items() if name.startswith("test_counting.")}
    assert of_the_device == {f"on a card: {real_device.FOLDERS['softnpu']}"}
    assert not [name for name in passed if name.startswith("test_counting.")]
    times = "test_benchmark_times."
    assert skipped[f"{times}test_events_enclose_each_run_and_nothing_else"] == f"on a card: {real_device.COUNTS}"
    assert skipped[f"{times}test_the_software_device_gives_no_times_whoever_asks"] == f"on a card: {real_device.SAYS}"
    assert f"{times}test_the_spread_is_median_and_quartiles" in passed
    assert [name for name in passed if name.startswith("test_linear_functions.")]
    assert [name for name in skipped if name.startswith("test_linear_functions.")]
