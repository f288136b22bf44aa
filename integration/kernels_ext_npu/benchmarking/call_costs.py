"""One call, run once to be compared, once to be counted, and on a card many times to be timed.

Times are between device events around each run, so that the host waits for none of them.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch_npu
from torch import Tensor, nn

import softnpu
from kernels_ext_npu.benchmarking.recorded_calls import Call
from kernels_ext_npu.measuring.costs import peak
from kernels_ext_npu.measuring.estimate import WorkCost
from kernels_ext_npu.measuring.roofline import soc_named
from softnpu.counting import STREAM_SYNCS

# what comes before a run and gives its argument, and the run
Before = Callable[[], Any]
Run = Callable[[Any], Any]

WARM_UP = 10
NO_TIMES = (
    "The software device computes on the host and says nothing about how fast a card is: it counts launches, bytes, "
    "waits of the host and memory, and measures no times. Run the same command on a machine with a card for those."
)


def method(repeats: int) -> str:
    """Say how times are measured."""
    return (
        f"Times are between device events around each of {repeats} runs, after {WARM_UP} that are not counted: median "
        "and quartiles. The host waits for the device before the first and after the last, not in between."
    )


def record(before: Before, run: Run, warm_up: int, repeats: int) -> list[tuple[Any, Any]]:
    """Run it between two events of the device, and return the events of each run; what comes before lies outside.

    The device waits for nothing but its work when the first run begins, and has done the last one in the end.
    """
    for _ in range(warm_up):
        run(before())
    torch_npu.npu.synchronize()
    events = []
    for _ in range(repeats):
        prepared = before()
        start, end = (torch_npu.npu.Event(enable_timing=True) for _ in range(2))
        start.record()
        run(prepared)
        end.record()
        events.append((start, end))
    torch_npu.npu.synchronize()
    return events


def times(before: Before, run: Run, repeats: int) -> dict[str, float]:
    """Return the spread of the times of some runs; nothing of the software device, whoever asks."""
    if softnpu.is_software():
        return {}
    return spread([start.elapsed_time(end) for start, end in record(before, run, WARM_UP, repeats)])


def spread(times: list[float]) -> dict[str, float]:
    """Return median, quartiles and number of some milliseconds."""
    lower, median, upper = statistics.quantiles(times, n=4, method="inclusive")
    return {"median_ms": median, "lower_quartile_ms": lower, "upper_quartile_ms": upper, "repeats": len(times)}


@dataclass
class Work:
    """A call of a model, ready to be run forward and backward."""

    call: Call
    model: nn.Module
    dtype: torch.dtype
    training: bool
    # of the outputs, the same for all who compute the call; empty where nothing is trained
    gradients: list[Tensor] = field(default_factory=list)

    def prepare(self) -> tuple[tuple, dict[str, Any], list[Tensor]]:
        """Fresh arguments, and parameters without gradients."""
        for parameter in self.call.parameters(self.model).values():
            parameter.grad = None
        return self.call.arguments(self.dtype)

    def forward(self, prepared: tuple[tuple, dict[str, Any], list[Tensor]]) -> list[Tensor]:
        args, kwargs, _ = prepared
        with torch.set_grad_enabled(self.training):
            result = self.call.target(self.model)(*args, **kwargs)
        return self.call.outputs(result)

    def backward(self, outputs: list[Tensor]) -> None:
        torch.autograd.backward([output for output in outputs if output.requires_grad], self.gradients)

    def results(self) -> dict[str, Tensor]:
        """Outputs and all gradients, by name."""
        prepared = self.prepare()
        outputs = self.forward(prepared)
        found = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
        trained = [output for output in outputs if output.requires_grad]
        if not trained:
            return found
        if not self.gradients:
            torch.manual_seed(0)
            self.gradients = [torch.randn(each.shape, device=each.device).to(each.dtype) for each in trained]
        self.backward(outputs)
        inputs = {f"gradient of input {i}": leaf.grad for i, leaf in enumerate(prepared[2])}
        parameters = self.call.parameters(self.model).items()
        inputs |= {f"gradient of {name}": parameter.grad for name, parameter in parameters}
        return found | {name: gradient for name, gradient in inputs.items() if gradient is not None}

    def directions(self) -> dict[str, tuple[Before, Run]]:
        """What can be measured: by name what comes before, and what is measured."""
        forward: dict[str, tuple[Before, Run]] = {"forward": (self.prepare, self.forward)}
        if not self.gradients:
            return forward
        return forward | {
            "backward": (lambda: self.forward(self.prepare()), self.backward),
            "both": (self.prepare, lambda prepared: self.backward(self.forward(prepared))),
        }


def count(before: Before, run: Run) -> dict[str, Any]:
    """Count launches, kernels and the bytes that these move, memory beyond what was held before, and waits of the host.

    Only the software device sees when the host waits. On a card the workload of an estimate is told, too.
    """
    prepared = before()
    torch_npu.npu.synchronize()
    waited = softnpu.counters().get(STREAM_SYNCS, 0)
    gc.disable()  # what it frees in between was held before
    try:
        with peak() as held, WorkCost(soc_named(torch_npu.npu.get_device_name(0))) as cost:
            result = run(prepared)
    finally:
        gc.enable()
    counted: dict[str, Any] = {
        "launches": cost.launches.total(),
        "kernels": cost.kernels.total(),
        "bytes": cost.bytes.total(),
        "peak_memory_bytes": held.number,
    }
    if softnpu.is_software():
        counted["host_waits"] = softnpu.counters().get(STREAM_SYNCS, 0) - waited
    else:
        counted["work"] = {part: float(f"{amount:.6g}") for part, amount in cost.workload.parts.items()}
    del result
    return counted
