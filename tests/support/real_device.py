"""Where there is a card, all tests run on it but those of the software device alone, which skip and say why.

These are the tests in some folders, tests that are marked `software`, since they read what is said of that device, and
tests that ask for its counts, by tests/support/npu_counts.py.
"""

import os

import pytest

import softnpu

# set by tests/test_real_device.py: the software device then says that it is a card
AS_ON_A_CARD = "TESTS_AS_ON_A_CARD"

FOLDERS = {
    "softnpu": "it tests the software device itself",
    "distributed": "its processes have a software device each",
    "variants": "its releases are emulated on the software device",
}
SAYS = "it reads what is said of the software device"


def play_a_card_where_asked() -> None:
    """Let the software device say that it is a card."""
    if os.environ.get(AS_ON_A_CARD):
        softnpu.is_software = lambda: False


def refuse_parts_of_the_software_device(items: list[pytest.Item]) -> None:
    """Let tests skip that are of the software device alone, if it is not what they would run on."""
    for item in items if not softnpu.is_software() else ():
        folder = item.path.relative_to(item.config.rootpath).parts[1]
        reason = FOLDERS.get(folder, SAYS if item.get_closest_marker("software") else None)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"on a card: {reason}"))
