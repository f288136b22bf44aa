"""What an estimate of time is made of: products, bytes in the cache and in memory, launches of host and device."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from kernels_ext_npu.measuring.costs import Cost
from kernels_ext_npu.measuring.estimate import CACHE, RATES, SPREAD, WorkCost, estimate
from kernels_ext_npu.measuring.links import MESH, SWITCH
from kernels_ext_npu.measuring.roofline import SOCS, soc_named

SOC = SOCS["910b2"]


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, trained: bool = False) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="npu", requires_grad=trained)


def test_a_product_is_one_of_the_forward_or_of_the_backward() -> None:
    size, once = 4096, 2 * 4096**3 / SOC.bfloat16
    with FakeTensorMode():
        x, weight = tensor(size, size, trained=True), tensor(size, size, trained=True)
        with WorkCost(SOC) as cost:
            (x @ weight).backward(tensor(size, size))
    parts = cost.workload.parts
    assert parts["product"] == pytest.approx(once)
    assert parts["product_backward"] == pytest.approx(2 * once)
    assert (parts["launch"], parts["launch_backward"], parts["kernel"], parts["further_kernel"]) == (1, 1, 3, 1)


def test_bytes_are_in_the_cache_where_they_were_just_made() -> None:
    """A sum of two tensors that nobody touched writes into the cache; the next one finds one of its two there."""
    with FakeTensorMode():
        a, b, c = (tensor(1024, 1024) for _ in range(3))
        with WorkCost(SOC) as cost:
            (a + b) + c
    third = 2 * 1024**2 / SOC.bandwidth
    assert cost.workload.parts["memory"] == pytest.approx(3 * third)
    assert cost.workload.parts["cache"] == pytest.approx(3 * third)


def test_bytes_leave_the_cache_when_as_many_others_have_moved() -> None:
    elements = CACHE // 4
    with FakeTensorMode():
        a, large = tensor(16), tensor(elements)
        with WorkCost(SOC) as cost:
            a.neg()
            large.neg()  # reads and writes as much as the cache holds
            before = cost.workload.parts["memory"]
            a.abs()
    assert cost.workload.parts["memory"] - before == pytest.approx(2 * 16 / SOC.bandwidth)


def test_a_weight_comes_from_memory_in_each_step() -> None:
    """A product with one row is bound by the bytes of its weight."""
    with FakeTensorMode():
        row, weight = tensor(1, 4096), tensor(4096, 4096)
        with WorkCost(SOC) as cost:
            row @ weight
    assert "product" not in cost.workload.parts
    assert cost.workload.parts["memory"] >= weight.nbytes / SOC.bandwidth


def test_the_longer_one_of_host_and_device_decides() -> None:
    found = estimate({"launch": 100, "kernel": 100, "product": 1e-4})
    assert found.host == pytest.approx(100 * RATES.launch)
    assert found.device == pytest.approx(100 * RATES.kernel + 1e-4 / RATES.product)
    assert (found.seconds, found.decided_by) == (found.host, "host")
    assert found.range == (found.host / SPREAD, found.host * SPREAD)
    assert estimate({"launch": 1, "product": 1.0}).decided_by == "device"


@pytest.mark.parametrize(
    ("links", "operator", "ranks", "milliseconds"),
    [
        # two devices of a mesh have one link of 28 GB/s, eight have seven; over it passes what a rank sends each other
        (MESH, "all_reduce", range(2), 2 * 28 / 28),
        (MESH, "all_gather", range(2), 28 / 28),
        (MESH, "all_reduce", range(8), 2 * 7 / 28),
        (MESH, "reduce_scatter", range(8), 7 / 28),
        (MESH, "all_to_all", range(8), 7 / 28),
        (MESH, "recv", range(8), 56 / 28),
        (MESH, "all_gather", range(1), 0),
        # two servers of eight: within each, then 3.5 MB and back, or half of what is exchanged, at 25 GB/s
        (MESH, "all_reduce", range(16), 2 * 7 / 28 + 2 * 3.5 / 25),
        (MESH, "all_to_all", range(16), 3.5 / 28 + 28 / 25),
        # one device of each server has the network card alone
        (MESH, "all_gather", (0, 8), 28 / 25),
        # dies of a 910C send all that they send over one link of 196 GB/s
        (SWITCH, "all_reduce", range(4), 2 * 42 / 196),
        (SWITCH, "all_to_all", range(16), 52.5 / 196),
    ],
)
def test_a_collective_takes_what_its_ranks_send(links, operator, ranks, milliseconds) -> None:
    """Of a message of 56 MB, by hand."""
    assert 1e3 * links.seconds(operator, ranks, 56e6) == pytest.approx(milliseconds)


def test_collectives_come_on_top_but_for_those_that_run_beside_the_kernels() -> None:
    work = {"product": RATES.product, "mesh": 0.5 * RATES.mesh, "collective": 2}
    took = 0.5 + 2 * RATES.collective
    assert estimate(work).device == pytest.approx(1 + took)
    assert estimate(work).collectives == pytest.approx(took)
    beside = {"product": RATES.product, "beside_mesh": 0.5 * RATES.mesh}
    assert (estimate(beside).device, estimate(beside).collectives) == pytest.approx((1, 0))
    assert estimate(beside | {"beside_mesh": 1.5 * RATES.mesh}).device == pytest.approx(1.5)


def test_kernels_start_sooner_in_a_graph() -> None:
    found = estimate({"kernel": 100, "attention_kernel": 10, "launch": 110})
    assert found.device == pytest.approx(100 * RATES.kernel + 10 * RATES.attention_kernel)
    assert found.graph == pytest.approx(100 * RATES.graph_kernel + 10 * RATES.attention_kernel)


def test_the_count_of_launches_is_the_same_with_a_workload() -> None:
    with FakeTensorMode():
        x = tensor(64, 64, trained=True)
        with Cost() as plain:
            torch.nn.functional.layer_norm(torch.nn.functional.silu(x) @ x, (64,)).sum().backward()
        with WorkCost(SOC) as cost:
            torch.nn.functional.layer_norm(torch.nn.functional.silu(x) @ x, (64,)).sum().backward()
    assert cost.launches.total() >= plain.launches.total()
    parts = cost.workload.parts
    assert parts["launch"] + parts["launch_backward"] == cost.launches.total()
    assert parts["kernel"] == cost.kernels.total()


@pytest.mark.parametrize(
    ("device", "name"),
    [("Ascend910B2", "910b2"), ("Ascend910B4-1", "910b4"), ("Ascend910_9392", "910c"), ("Ascend910B1", "910b3")],
)
def test_a_device_is_a_chip_by_its_name(device: str, name: str) -> None:
    assert soc_named(device) is SOCS[name]
