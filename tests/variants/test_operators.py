"""What torch_npu itself differentiates in this release, and a result that grows in it.

The device shows no gradient that the release does not have.
"""

from collections.abc import Callable

import pytest
import torch
import torch_npu
from torch import Tensor

TOKENS, SIZE, CHOICES = 6, 32, 2
INDEX = torch.tensor([[0, 2], [1, 0], [2, 1]], dtype=torch.int32)
ORDER = torch.tensor([0, 4, 2, 1, 5, 3], dtype=torch.int32)
COUNTS = torch.tensor([1, 2, 3])


def leaf(*shape: int) -> Tensor:
    return torch.rand(shape).npu().requires_grad_()


def grouped(x: Tensor) -> Tensor:
    options = {"group_list": COUNTS.npu(), "split_item": 3, "group_type": 0, "group_list_type": 1}
    return torch_npu.npu_grouped_matmul([x], [leaf(3, SIZE, 4)], **options)[0]


# each of tokens [6, 32]
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "npu_rms_norm": lambda x: torch_npu.npu_rms_norm(x, leaf(SIZE))[0],
    "npu_swiglu": torch_npu.npu_swiglu,
    "npu_geglu": lambda x: torch_npu.npu_geglu(x, -1, 1)[0],
    "npu_rotary_mul": lambda x: torch_npu.npu_rotary_mul(
        x.view(1, TOKENS, 1, SIZE), leaf(1, TOKENS, 1, SIZE), leaf(1, TOKENS, 1, SIZE)
    ),
    "npu_moe_token_permute": lambda x: torch_npu.npu_moe_token_permute(x[:3], INDEX.npu())[0],
    "npu_moe_token_unpermute": lambda x: torch_npu.npu_moe_token_unpermute(x, ORDER.npu(), leaf(3, CHOICES)),
    "npu_gemma_rms_norm": lambda x: torch_npu.npu_gemma_rms_norm(x, leaf(SIZE))[0],
    "npu_grouped_matmul": grouped,
    "npu_add_rms_norm": lambda x: torch_npu.npu_add_rms_norm(x, leaf(TOKENS, SIZE), leaf(SIZE))[0],
    "npu_moe_gating_top_k_softmax": lambda x: torch_npu.npu_moe_gating_top_k_softmax(x, None, CHOICES)[0],
}
GRADIENT, NONE, RAISES = "gradient", "none", "raises"
# op-plugin, config/derivatives.yaml of each branch; from op-plugin 26.1 on, AutogradErrorFallback.cpp
ALWAYS = {"npu_rms_norm", "npu_swiglu", "npu_geglu", "npu_rotary_mul"}
OF_PERMUTATION = {"npu_moe_token_permute", "npu_moe_token_unpermute"}
REFUSED = {"npu_add_rms_norm", "npu_moe_gating_top_k_softmax"}


def expected(name: str) -> set[str]:
    if name in ALWAYS:
        return {GRADIENT}
    if name in OF_PERMUTATION:
        return {GRADIENT if hasattr(torch.ops.npu, f"{name}_grad") else NONE}
    return {NONE, RAISES} if name in REFUSED else {NONE}


def outcome(call: Callable[[Tensor], Tensor]) -> str:
    x = leaf(TOKENS, SIZE)
    y = call(x)
    assert y.requires_grad
    try:
        y.sum().backward()
    except RuntimeError as error:
        return RAISES if "is not implemented" in str(error) else str(error)
    return NONE if x.grad is None else GRADIENT


@pytest.mark.parametrize("name", CALLS)
def test_an_operator_has_the_gradient_that_its_release_has(name: str) -> None:
    assert outcome(CALLS[name]) in expected(name)


def test_the_operators_that_refuse_a_gradient_do_so_together() -> None:
    assert len({outcome(CALLS[name]) for name in REFUSED}) == 1


@pytest.mark.parametrize("call", [torch.add, torch.matmul, torch.maximum], ids=lambda call: call.__name__)
def test_an_empty_result_grows_to_what_is_written_to_it(call: Callable[..., Tensor]) -> None:
    """Below autograd, where ``as_strided_`` of torch_npu 2.6 must not be used."""
    a, b = torch.rand(2, 5, 5).unbind()
    found = torch.empty(0, device="npu")
    assert call(a.npu(), b.npu(), out=found) is found
    torch.testing.assert_close(found.cpu(), call(a, b))
