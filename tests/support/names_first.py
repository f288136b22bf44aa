"""Other libraries rename what we rely on: the tests that say so go first, and alone where one of them fails."""

import pytest

FILE = "test_names_of_others.py"


def leave_the_rest_where_one_is_gone(items: list[pytest.Item]) -> None:
    """Keep the tests of names alone, if they are among those to run and a name is gone: the others fail for that."""
    names = [item for item in items if item.path.name == FILE]
    if not any(map(_fails, names)):
        return
    rest = [item for item in items if item not in names]
    names[0].config.hook.pytest_deselected(items=rest)
    items[:] = names


def _fails(item: pytest.Item) -> bool:
    """Tell whether a test of a row fails; those of the list itself say nothing of other libraries."""
    assert isinstance(item, pytest.Function)
    try:
        item.obj(**item.callspec.params) if hasattr(item, "callspec") else None
    except (AssertionError, pytest.fail.Exception):
        return True
    return False
