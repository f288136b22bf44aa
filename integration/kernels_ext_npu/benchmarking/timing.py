"""How long runs take on a card: by device events around each, so that the host waits for none of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch_npu

import softnpu

# what comes before a run and gives its argument, and the run
Before = Callable[[], Any]
Run = Callable[[Any], Any]

WARM_UP = 10
NO_TIMES = (
    "The software device computes on the host and says nothing about how fast a card is: it counts launches, bytes, "
    "waits of the host and memory, and measures no times. Run the same command on a machine with a card for those."
)


class NoTimesError(RuntimeError):
    """There is no device here whose times would mean anything."""


class DeviceClock:
    """The clock of the NPU."""

    def mark(self) -> torch_npu.npu.Event:
        """Record an event in the stream of the host, behind the work that the device was given so far."""
        event = torch_npu.npu.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """Wait for all streams."""
        torch_npu.npu.synchronize()

    def between(self, start: torch_npu.npu.Event, end: torch_npu.npu.Event) -> float:
        """Return the milliseconds between two events.

        Raises:
            NoTimesError: it is the software device, whoever asks.
        """
        if softnpu.is_software():
            raise NoTimesError(NO_TIMES)
        return start.elapsed_time(end)


def method(repeats: int) -> str:
    """Say how times are measured."""
    return (
        f"Times are between device events around each of {repeats} runs, after {WARM_UP} that are not counted: median "
        "and quartiles. The host waits for the device before the first and after the last, not in between."
    )


def record(clock: DeviceClock, before: Before, run: Run, warm_up: int, repeats: int) -> list[tuple[Any, Any]]:
    """Run it with a mark before and after each run, and return the marks; what comes before a run lies outside.

    The device waits for nothing but its work when the first run begins, and has done the last one in the end.
    """
    for _ in range(warm_up):
        run(before())
    clock.wait()
    marks = []
    for _ in range(repeats):
        prepared = before()
        start = clock.mark()
        run(prepared)
        marks.append((start, clock.mark()))
    clock.wait()
    return marks


def times(clock: DeviceClock, before: Before, run: Run, warm_up: int, repeats: int) -> list[float]:
    """Return the milliseconds of each of some runs.

    Raises:
        NoTimesError: the clock is that of the software device.
    """
    return [clock.between(start, end) for start, end in record(clock, before, run, warm_up, repeats)]


def spread(times: list[float]) -> dict[str, float]:
    """Return median, quartiles and number of some times."""
    lower, median, upper = statistics.quantiles(times, n=4, method="inclusive")
    return {"median_ms": median, "lower_quartile_ms": lower, "upper_quartile_ms": upper, "repeats": len(times)}
