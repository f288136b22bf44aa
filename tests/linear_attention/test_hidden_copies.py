"""What CANN would copy before and behind the operators of delta rules and scans: counted on fake tensors."""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from kernels_ext_npu.measuring.costs import Cost
from kernels_ext_npu.measuring.distance import tensors

COPIES = {"copy_", "_to_copy", "clone"}  # which turn what they read on their way


class StridedOperands(Cost):
    """A count of the bytes of operands that do not lie as an operator wants them, and of what they are read beside.

    ``l0op::Contiguous`` copies them first: CANN's ops-math, conversion/contiguous. Products take matrices that are
    turned: ``IsTransposeLastTwoDims`` of ops-nn, matmul/common/op_host/op_api/matmul_util.cpp.
    """

    copied = 0

    def count(self, operator: torch._ops.OpOverload, args: tuple, kwargs: dict, result: Any) -> Any:
        found, name = super().count(operator, args, kwargs, result), operator._schema.name.split("::")[1]
        if found is not None and name not in COPIES:
            operands = [x for x in tensors((args, kwargs)) if not x.is_contiguous()]
            if name == "bmm":
                operands = [x for x in operands if not x.transpose(-1, -2).is_contiguous()]
            self.copied += sum(x.nbytes for x in operands)
        return found


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="npu", requires_grad=True)


def arguments(by_channel: bool) -> list[Tensor]:
    heads = [empty(1, 512, count, 128) for count in ((4, 4, 4) if by_channel else (2, 2, 4))]
    return [*heads, empty(1, 512, 4, *([128] if by_channel else []), dtype=torch.float32), empty(1, 512, 4)]


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "chunk_kda"])
def test_a_delta_rule_copies_few_operands_first(kernel: ModuleType, name: str) -> None:
    """Less than a twentieth of what it moves, in both directions."""
    with FakeTensorMode(allow_non_fake_inputs=True), StridedOperands() as cost:
        out, _ = getattr(kernel, name)(*arguments(name == "chunk_kda"), use_qk_l2norm_in_kernel=True)
        out.backward(torch.empty_like(out))
    assert 20 * cost.copied < cost.bytes.total()


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "chunk_kda"])
def test_what_is_added_to_a_product_is_copied_by_nobody(kernel: ModuleType, name: str) -> None:
    """``baddbmm`` copies it, in float32 with a weight of one too."""
    with FakeTensorMode(allow_non_fake_inputs=True), Cost() as cost:
        out, _ = getattr(kernel, name)(*arguments(name == "chunk_kda"), use_qk_l2norm_in_kernel=True)
        out.backward(torch.empty_like(out))
    assert not cost.launches["baddbmm"]


def test_a_selective_scan_turns_its_arguments_once(kernel: ModuleType) -> None:
    """Less than a fiftieth of what it moves is copied first, though all its arguments are turned."""
    with FakeTensorMode(allow_non_fake_inputs=True), StridedOperands() as cost:
        u, delta, z = (empty(1, 256, 64) for _ in range(3))
        b, c = (empty(1, 8, 64) for _ in range(2))
        decays = empty(256, 8, dtype=torch.float32)
        y = kernel.selective_scan_fn(u, delta, decays, b, c, empty(256), z, empty(256), delta_softplus=True)
        y.backward(torch.empty_like(y))
    assert 50 * cost.copied < cost.bytes.total()
