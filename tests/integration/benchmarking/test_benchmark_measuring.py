"""How `kernels-ext-npu benchmark` counts and compares."""

import pytest
import torch

from kernels_ext_npu.benchmarking import agreement, call_costs
from kernels_ext_npu.measuring.distance import DisagreementError, Distance, distances
from tests.support import npu_counts

# --- counts


def test_what_is_counted_is_the_run() -> None:
    def before() -> torch.Tensor:
        return torch.ones(1024, device="npu") + 1

    def run(x: torch.Tensor) -> torch.Tensor:
        (x * 2).sum().item()
        return x + 1

    counted = call_costs.count(before, run)
    assert counted["launches"] == 3  # mul, sum, add; reading a value is none
    assert counted["bytes"] == 4 * (2 * 1024 + 1024 + 1 + 2 * 1024)
    assert counted.get("host_waits", 1) == 1  # which a card does not tell
    assert 2 * 4096 > counted["peak_memory_bytes"] - 1024 >= 4096 - 1024  # the product is gone before the sum is


def test_a_loop_in_the_place_of_an_operator_is_counted_as_what_the_device_runs() -> None:
    """torch_npu has no kernel for grouped_mm: torch runs a product for each group."""
    offsets = torch.tensor([4, 4, 16], dtype=torch.int32, device="npu")
    rows, matrices = torch.ones(16, 32, device="npu"), torch.ones(3, 32, 8, device="npu")
    npu_counts.reset()
    counted = call_costs.count(lambda: None, lambda _: torch.nn.functional.grouped_mm(rows, matrices, offs=offsets))
    assert counted["launches"] == npu_counts.read()["mm"] == 3


def test_what_was_held_before_does_not_count() -> None:
    def before() -> torch.Tensor:
        torch.ones(1 << 22, device="npu").add_(1)  # and gone
        return torch.ones(1 << 20, device="npu")

    assert call_costs.count(before, lambda x: x.add_(1))["peak_memory_bytes"] == 0


# --- agreement


@pytest.fixture
def exact() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"output 0": torch.randn(64, 256), "gradient of weight": torch.randn(256) * 100}


def check(found: dict, exact: dict, dtype: torch.dtype) -> None:
    """Held against an original that rounds each result once."""
    original = {name: value.to(dtype) if value.is_floating_point() else value for name, value in exact.items()}
    agreement.check(distances(found, exact), distances(original, exact), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_rounding_more_than_the_original_agrees(exact, dtype) -> None:
    """Values are split, rounded, and put together again."""
    third = {name: (value / 3).to(dtype) for name, value in exact.items()}
    check({name: part + 2 * part for name, part in third.items()}, exact, dtype)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda y: y * 1.02,
        lambda y: y + 0.02 * y.abs().mean(),
        lambda y: torch.where(torch.arange(y.numel()).view(y.shape) == 7, -y, y),  # one value
        lambda y: torch.where(torch.arange(y.numel()).view(y.shape) == 7, torch.nan, y),
        torch.zeros_like,
        lambda y: y.flip(0),
    ],
)
@pytest.mark.parametrize("name", ["output 0", "gradient of weight"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_wrong_values_disagree(exact, spoil, name, dtype) -> None:
    found = {key: value.to(dtype) for key, value in exact.items()}
    check(found, exact, dtype)
    found[name] = spoil(exact[name]).to(dtype)
    with pytest.raises(DisagreementError, match=f"{name} is .* away from float32"):
        check(found, exact, dtype)


def test_a_missing_gradient_or_another_choice_disagrees(exact) -> None:
    with pytest.raises(DisagreementError, match="gradient of weight is missing"):
        check({"output 0": exact["output 0"]}, exact, torch.bfloat16)
    with pytest.raises(DisagreementError, match="output 0: 1 of 2 values are other ones"):
        check({"output 0": torch.tensor([[1, 5]])}, {"output 0": torch.tensor([[1, 2]])}, torch.bfloat16)


def test_a_gradient_that_is_zero_in_mathematics_may_be_rounding_errors(exact) -> None:
    exact["gradient of key bias"] = torch.zeros(64)
    found = {name: value.to(torch.bfloat16) for name, value in exact.items()}
    found["gradient of key bias"] = torch.full((64,), 5e-4, dtype=torch.bfloat16)  # beside a norm of 1600
    check(found, exact, torch.bfloat16)
    found["gradient of key bias"] += 10
    with pytest.raises(DisagreementError, match="gradient of key bias"):
        check(found, exact, torch.bfloat16)


def test_few_values_may_differ_as_the_worst_of_the_original_does() -> None:
    """Eight values may happen to be near: then twice that is no measure."""
    exact = {"output 0": torch.ones(256), "gradient of sinks": torch.ones(8)}
    original = distances({"output 0": torch.ones(256) * 1.01, "gradient of sinks": torch.ones(8)}, exact)
    near = distances({"output 0": torch.ones(256), "gradient of sinks": torch.ones(8) * 1.015}, exact)
    agreement.check(near, original, torch.bfloat16)
    far = distances({"output 0": torch.ones(256), "gradient of sinks": torch.ones(8) * 1.03}, exact)
    with pytest.raises(DisagreementError, match="gradient of sinks"):
        agreement.check(far, original, torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "times"), [("output 0", 2), ("gradient of weight", 3), ("gradient of k_proj.bias", 4)]
)
def test_gradients_may_differ_by_more_times(name: str, times: int) -> None:
    """That of a softmax is of a rounded output; what is a sum over all tokens keeps the roundings of its terms."""
    original = {name: Distance(norm=0.01, largest=1.0, values=agreement.FEW)}
    agreement.check({name: Distance(0.0099 * times, 1.0, agreement.FEW)}, original, torch.bfloat16)
    with pytest.raises(DisagreementError, match="is allowed"):
        agreement.check({name: Distance(0.0101 * times, 1.0, agreement.FEW)}, original, torch.bfloat16)
