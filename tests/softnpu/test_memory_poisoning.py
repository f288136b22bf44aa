"""softnpu.poisoned_memory(): what nobody wrote is NaN."""

import pytest
import torch

import softnpu

ALLOCATIONS = {
    "empty": lambda: torch.empty(5, device="npu"),
    "empty_like": lambda: torch.empty_like(torch.ones(3, 4, device="npu").t()),
    "empty_strided": lambda: torch.empty_strided((2, 2), (1, 4), device="npu"),
    "new_empty": lambda: torch.ones(2, device="npu").new_empty(4),
    "new_empty_strided": lambda: torch.ones(2, device="npu").new_empty_strided((2, 2), (2, 1)),
    "growing": lambda: torch.ones(2, device="npu").resize_(1000)[2:],
}


@pytest.mark.parametrize("allocate", ALLOCATIONS.values(), ids=ALLOCATIONS)
def test_fresh_memory_holds_nan_in_the_context_only(allocate) -> None:
    plain = allocate()
    with softnpu.poisoned_memory():
        fresh = allocate()
    assert fresh.isnan().all()
    assert (fresh.shape, fresh.stride(), fresh.dtype) == (plain.shape, plain.stride(), plain.dtype)
    torch.npu.empty_cache()
    block = torch.zeros(3, 1 << 20, device="npu").data_ptr()  # freed at once, and the one block of this size
    after = torch.empty(3, 1 << 20, device="npu")
    assert after.data_ptr() == block
    assert not after.isnan().any()


def test_contexts_nest() -> None:
    with softnpu.poisoned_memory():
        with softnpu.poisoned_memory():
            assert torch.empty(0, 3, device="npu").shape == (0, 3)
        assert torch.empty(3, device="npu").isnan().all()
