"""Which tests are of the software device alone: on a machine with a card they skip, and all others run on the card.

A test is of the software device if it stands in a folder of such tests, or if what it runs reaches its counters or
anything else of `softnpu` that does nothing on a card. That is read from the code of the test, of its fixtures, and of
the functions of the tests that these call. Where the package reads counters for a test, this does not show: such a test
is marked `software`. What compares values runs on both.
"""

import functools
import inspect
import os
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import pytest

import softnpu

# set by tests/test_real_device.py: the software device then answers as `softnpu` does on a card
AS_ON_A_CARD = "TESTS_AS_ON_A_CARD"

FOLDERS = {
    "softnpu": "it tests the software device itself",
    "distributed": "its processes have a software device each",
    "variants": "its releases are emulated on the software device",
}
COUNTS = "it counts what the software device counts"
PARTS = "it uses parts of the software device"
SAYS = "it reads what is said of the software device"
# of `softnpu`: what counts nothing on a card, and words that a test of its messages has
COUNTING = frozenset({"counters", "reset_counters", "collectives"})
NAMES = ("software device", "SOFTNPU_")


def refuse_parts_of_the_software_device(items: list[pytest.Item]) -> None:
    """Let the tests skip that are of the software device alone, if it is not what they would run on."""
    if softnpu.is_software():
        return
    for item in items:
        reason = why_not_on_a_card(item)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"on a card: {reason}"))


def say_that_it_is_a_card() -> None:
    """Let the software device answer as `softnpu` does on a card, if the environment asks for it."""
    if os.environ.get(AS_ON_A_CARD):
        softnpu.is_software = lambda: False
        softnpu.counters = lambda in_graphs=False: {"stream_syncs": 0, "device_to_host_copies": 0}
        softnpu.reset_counters = lambda: None
        softnpu.collectives = dict


def why_not_on_a_card(item: pytest.Item) -> str | None:
    """Return why a test cannot say anything on a card; None if it can."""
    folder = item.path.relative_to(item.config.rootpath).parts[1]
    if folder in FOLDERS:
        return FOLDERS[folder]
    if item.get_closest_marker("software"):
        return SAYS
    fixtures = [each.func for named in item._fixtureinfo.name2fixturedefs.values() for each in named]
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    started = [item.function, *fixtures, *parameters]
    found = {reason for each in started for reason in reasons(each)}
    return next((reason for reason in (COUNTS, PARTS, SAYS) if reason in found), None)


def reasons(started: Any) -> Iterator[str]:
    """Go through all that a function reaches within the tests, once."""
    seen: set[int] = set()
    waiting = [started]
    while waiting:
        value = _plain(waiting.pop())
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, str):
            yield from _of_text(value)
        elif isinstance(value, FunctionType):
            if value.__module__.startswith("softnpu.") and value.__module__ != "softnpu.pytest_plugin":
                yield PARTS
            elif _is_of_the_tests(value.__module__):
                yield from _of_code(value.__code__)
                waiting += _reached(value)
        elif isinstance(value, type) and _is_of_the_tests(value.__module__):
            waiting += [_plain(member) for member in vars(value).values()]
        elif isinstance(value, ModuleType) and value.__name__.startswith("softnpu."):
            yield PARTS


def _plain(value: Any) -> Any:
    """Return the function of a test behind what wraps it."""
    if isinstance(value, functools.partial):
        return _plain(value.func)
    if isinstance(value, MethodType | staticmethod | classmethod):
        return _plain(value.__func__)
    if isinstance(value, property):
        return _plain(value.fget)
    if hasattr(value, "hypothesis") and isinstance(value, FunctionType):
        return _plain(value.hypothesis.inner_test)
    return inspect.unwrap(value) if isinstance(value, FunctionType) else value


def _is_of_the_tests(module: str | None) -> bool:
    name = (module or "").partition(".")[0]
    return name in ("tests", "conftest") or name.startswith("test_") or module == "softnpu.pytest_plugin"


def _reached(function: FunctionType) -> Iterator[Any]:
    """Give what a function names and holds: globals, members of modules of the tests, closures, defaults, texts."""
    codes = list(_codes(function.__code__))
    named = {name for code in codes for name in code.co_names}
    for name in named:
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType) and _is_of_the_tests(value.__name__):
            yield from (vars(value)[member] for member in named & vars(value).keys())
        else:
            yield value
    yield from (cell.cell_contents for cell in function.__closure__ or ())
    yield from function.__defaults__ or ()
    yield from (const for code in codes for const in code.co_consts if const != function.__doc__)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _codes(const)


def _of_code(code: CodeType) -> Iterator[str]:
    named = {name for each in _codes(code) for name in each.co_names}
    if "softnpu" in named and named & COUNTING:
        yield COUNTS


def _of_text(text: str) -> Iterator[str]:
    if any(f"softnpu.{name}" in text for name in COUNTING):
        yield COUNTS
    if any(name in text for name in NAMES):
        yield SAYS
