"""What an estimate of time is made of: products, bytes in the cache and in memory, launches of host and device."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from kernels_ext_npu.measuring.costs import Cost
from kernels_ext_npu.measuring.estimate import CACHE, RATES, SPREAD, WorkCost, estimate
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
