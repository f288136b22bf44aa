"""`make test` on a machine with a card: which tests skip there, and that the others run.

The software device plays the card.
"""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.npu_counts import REASON as COUNTS
from tests.support.real_device import AS_ON_A_CARD, FOLDERS, SAYS

ROOT = Path(__file__).resolve().parent.parent
SOME = (
    "tests/integration/benchmarking/test_benchmark_times.py",
    "tests/integration/test_kernels_as_functions.py",
    "tests/linear/test_patch_embeddings.py",
    "tests/softnpu/test_counting.py",
)


@pytest.mark.long
def test_tests_of_the_software_device_skip_on_a_card_and_the_others_run(run_python, tmp_path: Path) -> None:
    written = tmp_path / "results.xml"
    options = ["-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={written}", *SOME]
    ran = run_python(None, *options, directory=ROOT, **{AS_ON_A_CARD: "1"})
    assert "npu: real device" in ran.stdout
    skipped: dict[str, dict[str, str]] = {Path(path).stem: {} for path in SOME}
    passed: dict[str, set[str]] = {Path(path).stem: set() for path in SOME}
    for case in ElementTree.parse(written).getroot().iter("testcase"):
        file, name = case.get("classname", "").rpartition(".")[2], case.get("name", "").partition("[")[0]
        skip = case.find("skipped")
        if skip is None:
            passed[file].add(name)
        else:
            skipped[file][name] = skip.get("message", "").removeprefix("on a card: ")
    assert set(skipped["test_counting"].values()) == {FOLDERS["softnpu"]}
    assert not passed["test_counting"]
    times = skipped["test_benchmark_times"]
    assert times["test_events_enclose_each_run_and_nothing_else"] == COUNTS
    assert times["test_the_software_device_gives_no_times_whoever_asks"] == SAYS
    assert "test_the_spread_is_median_and_quartiles" in passed["test_benchmark_times"]
    assert COUNTS in skipped["test_kernels_as_functions"].values()  # in a process of its own
    assert passed["test_patch_embeddings"]
    assert COUNTS in skipped["test_patch_embeddings"].values()
