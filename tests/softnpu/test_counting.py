"""softnpu.counters(): operator calls, and every point where the host waits for the device."""

import pytest
import torch
import torch_npu

import softnpu

WAITS = ("stream_syncs", "device_to_host_copies")


def waits(function) -> tuple[int, int]:
    softnpu.reset_counters()
    function()
    counters = softnpu.counters()
    return counters["stream_syncs"], counters["device_to_host_copies"]


@pytest.fixture
def x() -> torch.Tensor:
    return torch.tensor([[3.0, 0.0], [1.0, 2.0]], device="npu")


# what makes the host wait, of a tensor of two rows: how often for a stream, and how many copies it makes
WAITING = [
    (lambda x: x.cpu(), 1, 1),
    (lambda x: x.to("cpu", torch.float64), 1, 1),
    (lambda x: x[0, 0].item(), 1, 1),
    (lambda x: float(x.sum()), 1, 1),
    (lambda x: torch.equal(x, x), 1, 1),
    (lambda x: torch.empty(2, 2).copy_(x), 1, 1),
    (lambda x: x.to("cpu", non_blocking=True), 0, 1),  # torch_npu pins the target
    (lambda x: x.nonzero(), 1, 0),
    (lambda x: x[x > 1], 1, 0),
    (lambda x: x.masked_select(x > 1), 1, 0),
    (lambda x: x.__setitem__(x > 1, 0.0), 1, 0),
    (lambda x: torch.unique(x), 1, 0),
    (lambda x: torch.repeat_interleave(x, torch.tensor([1, 2], device="npu"), 0), 1, 0),
    (lambda x: torch.histc(x, bins=4), 2, 2),  # for both ends of the range
    (lambda x: torch.npu.synchronize(), 1, 0),
    (lambda x: torch.npu.current_stream().synchronize(), 1, 0),
]


@pytest.mark.parametrize(("wait", "syncs", "copies"), WAITING)
def test_waits_are_counted_wherever_they_are_dispatched(x: torch.Tensor, wait, syncs: int, copies: int) -> None:
    assert waits(lambda: wait(x)) == (syncs, copies)


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x[torch.tensor([1, 0], device="npu")],
        lambda x: torch.ones(3).to("npu"),
        lambda x: torch.histc(x, bins=4, min=0, max=3),
        lambda x: x.repeat_interleave(2, 0),
        lambda x: x.repeat_interleave(torch.tensor([1, 2], device="npu"), 0, output_size=3),
        lambda x: torch.npu.Event().record(),
    ],
)
def test_work_without_a_wait_counts_none(x: torch.Tensor, work) -> None:
    assert waits(lambda: work(x)) == (0, 0)


def test_waits_in_a_backward_pass_are_counted(x: torch.Tensor) -> None:
    y = x.requires_grad_() * 2
    y.register_hook(lambda grad: grad * grad.sum().item())
    assert waits(y.sum().backward) == (1, 1)


def test_operators_that_torch_npu_runs_on_the_cpu_count_as_copies(x: torch.Tensor) -> None:
    assert waits(lambda: torch.fmax(x, x))[1] >= 2


def test_calls_are_counted_by_name_and_reset(x: torch.Tensor) -> None:
    softnpu.reset_counters()
    weight = torch.ones(2, device="npu")
    for _ in range(3):
        torch_npu.npu_rms_norm(x, weight, 1e-6)
    torch.add(x, x, out=x + 1)
    x.t().unsqueeze(0)
    counters = softnpu.counters()
    assert counters["npu_rms_norm"] == 3
    assert counters["add"] == 2
    assert counters.keys() == {"npu_rms_norm", "add", "ones", *WAITS}
    softnpu.reset_counters()
    assert softnpu.counters() == dict.fromkeys(WAITS, 0)
