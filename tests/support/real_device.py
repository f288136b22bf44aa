"""Where there is a card, all tests run on it but those of the software device alone, which skip and say why.

These are the tests in some folders, tests that are marked `software`, since they read what is said of that device, and
tests that ask it for counts: what they have compared until then was compared on the card.
"""

import inspect
import os
from collections.abc import Callable
from typing import Any

import pytest

import softnpu

# set by tests/test_real_device.py: the software device then says that it is a card
AS_ON_A_CARD = "TESTS_AS_ON_A_CARD"

FOLDERS = {
    "softnpu": "it tests the software device itself",
    "distributed": "its processes have a software device each",
    "variants": "its releases are emulated on the software device",
}
COUNTS = "it counts what the software device counts"
SAYS = "it reads what is said of the software device"
COUNTING = ("counters", "reset_counters", "collectives")


def skip_what_counts() -> None:
    """Let functions of `softnpu` that count nothing on a card skip the test that calls them."""
    if os.environ.get(AS_ON_A_CARD):
        softnpu.is_software = lambda: False
    if not softnpu.is_software():
        for name in COUNTING:
            setattr(softnpu, name, _skipping(getattr(softnpu, name)))


def _skipping(function: Callable[..., Any]) -> Callable[..., Any]:
    """Skip where a test calls, and count nothing where the package does."""

    def call(*arguments: Any, **options: Any) -> Any:
        frame = inspect.currentframe()
        assert frame is not None
        assert frame.f_back is not None
        module = frame.f_back.f_globals.get("__name__", "")
        if not module.startswith(("kernels_ext_npu", "softnpu.")) or module == "softnpu.pytest_plugin":
            pytest.skip(f"on a card: {COUNTS}")
        return function(*arguments, **options)

    return call


def skip_code_that_counts(code: str | None) -> None:
    """Skip a test that is about to run such code in a process of its own."""
    if not softnpu.is_software() and any(f"softnpu.{name}" in (code or "") for name in COUNTING):
        pytest.skip(f"on a card: {COUNTS}")


def refuse_parts_of_the_software_device(items: list[pytest.Item]) -> None:
    """Let tests skip that are of the software device alone, if it is not what they would run on."""
    for item in items if not softnpu.is_software() else ():
        folder = item.path.relative_to(item.config.rootpath).parts[1]
        reason = FOLDERS.get(folder, SAYS if item.get_closest_marker("software") else None)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"on a card: {reason}"))
