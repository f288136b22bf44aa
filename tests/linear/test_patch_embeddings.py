"""Embeddings of patches against torch's convolutions in float64, with what they launch."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels_ext_npu.selftest import comparing
from tests.support import npu_counts

# of a product that is rounded once, and of gradients that are sums of rounded values, relative to the norm
ROUNDING = {torch.float32: 2e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
# the sizes of x without its batch, and of a patch
SHAPES = {
    "one patch each": ((3, 2, 4, 4), (2, 4, 4)),
    "a grid": ((3, 8, 12), (4, 4)),
    "a grid of oblong patches": ((2, 6, 8), (3, 2)),
    "what is left is cut off": ((3, 11, 14), (4, 4)),
    "frames": ((3, 4, 8, 6), (2, 4, 3)),
    "one dimension": ((5, 13), (4,)),
    "one patch": ((3, 4, 4), (4, 4)),
}


def drawn(shape: tuple[int, ...], patch: tuple[int, ...], bias: bool, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    channels = shape[-len(patch) - 1]
    tensors = [torch.randn(shape), torch.randn(6, channels, *patch), *[torch.randn(6)] * bias]
    return [tensor.to(dtype) for tensor in tensors]


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("batch", [(), (1,), (2,)], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_values_and_gradients_are_those_of_a_convolution(kernel, name, batch, bias, dtype) -> None:
    shape, patch = SHAPES[name]
    tensors = drawn((*batch, *shape), patch, bias, dtype)
    found = comparing.results(kernel.patch_embedding, comparing.moved(tensors))
    assert found.outputs[0].is_contiguous()
    assert {tensor.dtype for tensor in (*found.outputs, *found.gradients)} == {dtype}
    expected = comparing.exact(partial(CONVOLUTIONS[len(patch)], stride=patch), tensors)
    assert comparing.difference(found, expected).largest <= ROUNDING[dtype]


@pytest.mark.parametrize(("name", "copies"), [("one patch each", 0), ("a grid", 2)])
def test_one_product_and_no_more_than_two_copies_are_launched(kernel, name, copies) -> None:
    shape, patch = SHAPES[name]
    x, weight, bias = (tensor.npu() for tensor in drawn((2, *shape), patch, True, torch.bfloat16))
    npu_counts.reset()
    kernel.patch_embedding(x, weight, bias)
    calls = npu_counts.read()
    assert not [call for call in calls if "conv" in call]
    assert calls.pop("addmm", 0) == 1
    assert sum(calls.values()) == copies


@pytest.mark.parametrize("shape", [(2, 3, 2, 8), (2, 4, 8, 8), (2, 2, 3, 8, 8), (8, 8)], ids=str)
def test_what_has_no_patches_is_refused(kernel, shape) -> None:
    with pytest.raises(ValueError, match=r"has no patches of weight"):
        kernel.patch_embedding(torch.randn(shape), torch.randn(6, 3, 4, 4))
