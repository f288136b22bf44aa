"""The order of tests that recognise a class or a function by running it, which takes longer than what they test."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the tests of one class follow each other: what was recognised is kept for the process."""
    places = [place for place, item in enumerate(items) if item.path.parent == HERE and _recognised(item) is not None]
    groups: dict[object, list[pytest.Item]] = {}
    for place in places:
        groups.setdefault((items[place].path, _recognised(items[place])), []).append(items[place])
    for place, item in zip(places, [item for group in groups.values() for item in group], strict=True):
        items[place] = item


def _recognised(item: pytest.Item) -> object:
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("served")
