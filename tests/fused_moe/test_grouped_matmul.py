"""What grouped_matmul, experts and moved parameters refuse."""

import pytest
import torch

BAD_PRODUCTS = {
    "x of three dimensions": ({"x": torch.ones(1, 4, 8)}, ValueError, "x must be [M, K] and weight [E, K, N]"),
    "another K": ({"x": torch.ones(4, 7)}, ValueError, "got [4, 7] and [2, 8, 6]"),
    "counts of another length": ({"counts": torch.ones(3, dtype=torch.long)}, ValueError, "counts must be [2]"),
    "counts of int32": ({"counts": torch.ones(2, dtype=torch.int32)}, TypeError, "counts must be int64"),
    "a bias of another size": ({"bias": torch.ones(2, 8)}, ValueError, "bias [2, 6]"),
    "two dtypes": ({"x": torch.ones(4, 8, dtype=torch.bfloat16)}, TypeError, "one floating dtype"),
    "integers": ({"x": torch.ones(4, 8).long(), "weight": torch.ones(2, 8, 6).long()}, TypeError, "floating dtype"),
    "a bias of integers": ({"bias": torch.ones(2, 6).long()}, TypeError, "bias must be floating point"),
    "too many rows": ({"counts": torch.tensor([4, 1])}, ValueError, "counts must add up to the 4 rows of x, got 5"),
}


@pytest.mark.parametrize("case", BAD_PRODUCTS)
def test_wrong_arguments_of_a_product_are_named(kernel, case) -> None:
    changes, error, message = BAD_PRODUCTS[case]
    given = {"x": torch.ones(4, 8), "weight": torch.ones(2, 8, 6), "counts": torch.tensor([1, 3]), "bias": None}
    with pytest.raises(error) as caught:
        kernel.grouped_matmul(**given | changes)
    assert message in str(caught.value)


BAD_EXPERTS = {
    "tokens of three dimensions": ({"hidden_states": torch.ones(1, 4, 8)}, ValueError, "reshape(-1, H) it"),
    "another k": ({"top_k_weights": torch.ones(4, 3)}, ValueError, "must both be [T, k] with T = 4"),
    "other tokens": ({"top_k_index": torch.zeros(5, 2).long()}, ValueError, "got [5, 2] and [4, 2]"),
    "indices that are floats": ({"top_k_index": torch.zeros(4, 2)}, TypeError, "must be int64 or int32"),
    "integers as weights": ({"top_k_weights": torch.ones(4, 2).long()}, TypeError, "must be floating point"),
    "a matrix": ({"down_proj": torch.ones(8, 5)}, ValueError, "must be three-dimensional"),
    "other experts": ({"down_proj": torch.ones(2, 8, 5)}, ValueError, "of as many experts"),
    "another H": ({"gate_up_proj": torch.ones(3, 10, 7)}, ValueError, "gate_up_proj must be [3, 2·I, 8]"),
    "another I": ({"down_proj": torch.ones(3, 8, 4)}, ValueError, "down_proj [3, 8, I]"),
    "two dtypes": ({"down_proj": torch.ones(3, 8, 5).half()}, TypeError, "one dtype"),
    "no gate": ({"down_proj": torch.ones(3, 8, 10)}, ValueError, "gate_up_proj must be [3, 2·I, 8]"),
    "a bias of integers": ({"down_proj_bias": torch.ones(3, 8).long()}, TypeError, "down_proj_bias must be floating"),
    "a bias elsewhere": ({"down_proj_bias": torch.ones(3, 8, device="npu")}, ValueError, "on one device"),
    "a bias of another size": ({"down_proj_bias": torch.ones(3, 5)}, ValueError, "down_proj_bias must be [3, 8]"),
    "an index too large": ({"top_k_index": torch.full((4, 2), 4)}, ValueError, "must be from 0 to 2, got 4 to 4"),
    "an index of E": ({"top_k_index": torch.full((4, 2), 3)}, ValueError, "must be from 0 to 2, got 3 to 3"),
    "an index below zero": ({"top_k_index": torch.full((4, 2), -1)}, ValueError, "from 0 to 2, got -1"),
}


@pytest.mark.parametrize("case", BAD_EXPERTS)
def test_wrong_arguments_of_experts_are_named(kernel, case) -> None:
    changes, error, message = BAD_EXPERTS[case]
    given = {
        "hidden_states": torch.ones(4, 8),
        "top_k_index": torch.zeros(4, 2, dtype=torch.long),
        "top_k_weights": torch.ones(4, 2),
        "gate_up_proj": torch.ones(3, 10, 8),
        "down_proj": torch.ones(3, 8, 5),
        "down_proj_bias": None,
    }
    with pytest.raises(error) as caught:
        kernel.fused_experts(**given | changes)
    assert message in str(caught.value)
