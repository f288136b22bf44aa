"""The attention of releases before 2.13, as it is composed of operators, against float64."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

import softnpu
from softnpu.composed_sdpa import scaled_dot_product_attention
from tests.softnpu.conforming import moved
from tests.support.rounding import assert_float64s

B, N, S, D = 2, 4, 6, 16
MASK = torch.ones(B, 1, S, S, dtype=torch.bool).tril()
CASES = {
    "none": {},
    "causal": {"is_causal": True},
    "boolean": {"attn_mask": MASK},
    "boolean of three dimensions": {"attn_mask": MASK[:, 0].unsqueeze(1).expand(B, N, S, S)[0]},
    "float": {"attn_mask": torch.linspace(-1, 1, S * S).view(S, S)},
    "scale": {"scale": 0.3},
}


def exact(mask: torch.Tensor) -> torch.Tensor:
    return mask.double() if mask.is_floating_point() else mask


@pytest.mark.parametrize("heads", [N, 2])
@pytest.mark.parametrize("case", CASES)
def test_it_is_what_torch_computes_with_its_gradients(case: str, heads: int) -> None:
    """To 1e-6 of the norm: two products and a softmax in float32, with sums in another order."""
    torch.manual_seed(0)
    tensors = [torch.randn(B, count, S, D) for count in (N, heads, heads)]
    options = CASES[case] | ({"enable_gqa": True} if heads != N else {})
    ours, theirs = partial(scaled_dot_product_attention, **moved(options, "npu")), F.scaled_dot_product_attention
    softnpu.reset_counters()
    assert_float64s(ours, partial(theirs, **tree_map_only(torch.Tensor, exact, options)), tensors, 1e-6)
    is_fused = case not in ("float", "boolean of three dimensions")
    assert softnpu.counters().get("npu_fusion_attention", 0) == is_fused


def test_a_mask_beside_is_causal_is_refused() -> None:
    x = torch.randn(B, N, S, D).npu()
    with pytest.raises(RuntimeError, match="attn_mask must be None"):
        scaled_dot_product_attention(x, x, x, MASK.npu(), is_causal=True)
