"""The attention of releases before 2.13, as it is composed of operators, against the CPU."""

import pytest
import torch
from torch.nn import functional as F

import softnpu
from softnpu.composed_sdpa import scaled_dot_product_attention

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


@pytest.mark.parametrize("heads", [N, 2])
@pytest.mark.parametrize("case", CASES)
def test_it_is_what_torch_computes_with_its_gradients(case: str, heads: int) -> None:
    """To 1e-6 of the norm: two products and a softmax in float32, with sums in another order."""
    torch.manual_seed(0)
    tensors = [torch.randn(B, count, S, D) for count in (N, heads, heads)]
    options = CASES[case] | ({"enable_gqa": True} if heads != N else {})
    moved = {name: value.npu() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    ours = [tensor.npu().requires_grad_() for tensor in tensors]
    theirs = [tensor.clone().requires_grad_() for tensor in tensors]
    softnpu.reset_counters()
    found, expected = scaled_dot_product_attention(*ours, **moved), F.scaled_dot_product_attention(*theirs, **options)
    is_fused = case not in ("float", "boolean of three dimensions")
    assert softnpu.counters().get("npu_fusion_attention", 0) == is_fused
    for y in (found, expected):
        y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y))
    for a, b in zip([found, *(t.grad for t in ours)], [expected, *(t.grad for t in theirs)]):
        assert (a.cpu() - b).norm() <= 1e-6 * b.norm()


def test_a_mask_beside_is_causal_is_refused() -> None:
    x = torch.randn(B, N, S, D).npu()
    with pytest.raises(RuntimeError, match="attn_mask must be None"):
        scaled_dot_product_attention(x, x, x, MASK.npu(), is_causal=True)
