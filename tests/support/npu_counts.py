"""Counts of the software device, for tests that compare them: on a card these skip where they ask for some."""

import pytest

import softnpu

REASON = "it counts what the software device counts"
CALLS = ("softnpu.counters", "softnpu.reset_counters", "softnpu.collectives")


def skip_on_a_card() -> None:
    """End a test that is about to count: what it has compared until then was compared on the card."""
    if not softnpu.is_software():
        pytest.skip(f"on a card: {REASON}")


def skip_code_on_a_card(code: str | None) -> None:
    """End a test that is about to run code which counts, in a process of its own."""
    if any(call in (code or "") for call in CALLS):
        skip_on_a_card()


def reset() -> None:
    """Begin to count anew: `softnpu.reset_counters`."""
    skip_on_a_card()
    softnpu.reset_counters()


def read(in_graphs: bool = False) -> dict[str, int]:
    """Return what was counted since: `softnpu.counters`."""
    skip_on_a_card()
    return softnpu.counters(in_graphs)
