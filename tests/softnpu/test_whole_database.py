"""The sample of torch's operator database, and when it is not enough."""

import pytest

from tests.softnpu import whole_database
from tests.softnpu.whole_database import covering, header, sample


def test_the_sample_launches_every_operator_with_few_tests() -> None:
    launched = {"first": {"mm"}, "small": {"add"}, "large": {"add", "mul", "mm"}, "other": {"exp", "add"}}
    assert covering({name: frozenset(names) for name, names in launched.items()}) == ["first", "large", "other"]


def test_another_release_of_torch_runs_the_whole_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_database, "version", lambda name: "0.1")
    assert sample() is None
    (line,) = header()
    assert line.startswith("operator database: all of it")


def test_a_changed_source_runs_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    test_files = (*whole_database.TEST_FILES, whole_database.ROOT / "LICENSE")
    monkeypatch.setattr(whole_database, "TEST_FILES", test_files)
    assert sample() is None
