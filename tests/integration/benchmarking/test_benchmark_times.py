"""How `kernels-ext-npu benchmark` takes times: by the events of torch_npu."""

import time

import numpy
import pytest
import torch

from kernels_ext_npu.benchmarking import call_costs
from tests.support import npu_counts


def test_events_enclose_each_run_and_nothing_else(monkeypatch) -> None:
    """Neither what comes before it: an event is recorded behind that, and one behind the run."""
    order = []
    event = torch.npu.Event
    recording = type("Recording", (event,), {"record": lambda self: order.append("event") or event.record(self)})
    monkeypatch.setattr(torch.npu, "Event", recording)

    def before() -> torch.Tensor:
        order.append("before")
        return torch.ones(4, device="npu")

    def run(prepared: torch.Tensor) -> None:
        order.append("run")
        prepared.add_(1)
        time.sleep(0.002)

    npu_counts.reset()
    events = call_costs.record(before, run, warm_up=3, repeats=5)
    assert order == ["before", "run"] * 3 + ["before", "event", "run", "event"] * 5
    assert npu_counts.read()["add_"] == 8
    assert npu_counts.read()["stream_syncs"] == 2  # after the warm-up and at the end: runs are not held up in between
    assert len(events) == 5
    assert all(event.query() for pair in events for event in pair)
    assert all(start.elapsed_time(end) > 1 for start, end in events)  # by the real runtime interface of torch_npu


@pytest.mark.software
def test_the_software_device_gives_no_times_whoever_asks() -> None:
    assert call_costs.times(lambda: None, lambda _: None, repeats=2) == {}


@pytest.mark.parametrize("times", [[3.0, 1.0, 2.0, 5.0, 4.0], [1.0] * 50, [0.1, 0.2, 9.0, 0.15], [1.0, 2.0]])
def test_the_spread_is_median_and_quartiles(times) -> None:
    lower, median, upper = numpy.percentile(times, [25, 50, 75])
    expected = {"median_ms": median, "lower_quartile_ms": lower, "upper_quartile_ms": upper, "repeats": len(times)}
    assert call_costs.spread(times) == pytest.approx(expected)
