"""What softmax_top_k refuses: the routers of transformers have the rest."""

import pytest
import torch


@pytest.mark.parametrize(
    ("logits", "k", "error", "message"),
    [
        (torch.zeros(2, 3, 4), 2, ValueError, "logits must be [T, E] and k from 1 to E, got [2, 3, 4] and k = 2"),
        (torch.zeros(2, 3), 4, ValueError, "got [2, 3] and k = 4"),
        (torch.zeros(2, 3), 0, ValueError, "got [2, 3] and k = 0"),
        (torch.zeros(2, 3).long(), 1, TypeError, "must be floating point, got torch.int64"),
    ],
)
def test_wrong_arguments_are_named(kernel, logits, k, error, message) -> None:
    with pytest.raises(error) as caught:
        kernel.softmax_top_k(logits, k)
    assert message in str(caught.value)
