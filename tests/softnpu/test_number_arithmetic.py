"""16-bit tensors that meet numbers: where CANN rounds, against float64 rounded at the same places."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

BF16, FP16 = torch.bfloat16, torch.float16
NUMBER = 0.3  # no 16-bit number
Formula = Callable[[Tensor, Tensor, Callable[[Tensor], Tensor], Tensor], Tensor]

# what is computed of x and y, rounded by r to the dtype, with the number n in float64 and rounded
CASES: dict[str, tuple[torch.dtype, Callable[[Tensor, Tensor], Tensor], Formula]] = {
    "add, alpha": (BF16, lambda x, y: x.add(y, alpha=NUMBER), lambda x, y, r, n: r(x + r(y * r(n)))),
    "add_, alpha": (BF16, lambda x, y: x.clone().add_(y, alpha=NUMBER), lambda x, y, r, n: r(x + r(y * r(n)))),
    "add, alpha, in float16": (FP16, lambda x, y: x.add(y, alpha=NUMBER), lambda x, y, r, n: r(x + y * n)),
    "sub, alpha": (BF16, lambda x, y: x.sub(y, alpha=NUMBER), lambda x, y, r, n: r(x - y * n)),
    "rsub, alpha": (FP16, lambda x, y: torch.rsub(x, y, alpha=NUMBER), lambda x, y, r, n: r(y - r(x * r(n)))),
    "add a number": (BF16, lambda x, y: x + NUMBER, lambda x, y, r, n: r(x + r(n))),
    "mul by a number": (BF16, lambda x, y: x * NUMBER, lambda x, y, r, n: r(x * n)),
    "mul by a number in float16": (FP16, lambda x, y: x * NUMBER, lambda x, y, r, n: r(x * r(n))),
    "mul.Scalar in float16": (FP16, lambda x, y: torch.ops.aten.mul.Scalar(x, NUMBER), lambda x, y, r, n: r(x * r(n))),
    "add.Scalar, alpha": (BF16, lambda x, y: torch.add(x, 2.0, alpha=NUMBER), lambda x, y, r, n: r(x + r(2 * r(n)))),
    "div_ by a number in float16": (FP16, lambda x, y: x.clone().div_(NUMBER), lambda x, y, r, n: r(x / r(n))),
    "a list, alpha": (
        BF16,
        lambda x, y: torch._foreach_add([x], [y], alpha=NUMBER)[0],
        lambda x, y, r, n: r(x + y * n),
    ),
    "a list, alpha, in float16": (
        FP16,
        lambda x, y: torch._foreach_sub([x], [y], alpha=NUMBER)[0],
        lambda x, y, r, n: r(x - r(y * r(n))),
    ),
    "a list, a product": (
        FP16,
        lambda x, y: torch._foreach_addcmul([x], [y], [x], [NUMBER])[0],
        lambda x, y, r, n: r(x + r(r(y * x) * r(n))),
    ),
    "a list, a quotient": (
        FP16,
        lambda x, y: torch._foreach_addcdiv([x], [y], [x], value=NUMBER)[0],
        lambda x, y, r, n: r(x + r(r(y / x) * r(n))),
    ),
    "a list and a number": (
        BF16,
        lambda x, y: torch._foreach_add_([x.clone()], NUMBER)[0],
        lambda x, y, r, n: r(x + n),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_number_is_rounded_where_the_device_rounds_it(name: str) -> None:
    """All but one in a hundred: float32, in which the device computes, may lie on the other side of a tie."""
    dtype, compute, formula = CASES[name]
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(1000, generator=generator).to(dtype) for _ in range(2))
    found = compute(x.npu(), y.npu()).cpu()
    number = torch.tensor(NUMBER, dtype=torch.float64)
    expected = formula(x.double(), y.double(), lambda t: t.to(dtype).double(), number)
    assert found.dtype == dtype
    assert (found.double() != expected).double().mean() < 0.01
