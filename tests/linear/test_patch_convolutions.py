"""Convolutions that cut pictures into patches: swapped by what they are, in models of transformers and of others."""

import copy

import pytest
import torch
from torch import nn

import kernels_ext_npu
from kernels_ext_npu.catalogue import PATCHES
from tests.support import zoo
from tests.support.nearness import assert_near
from tests.support.rounding import launched
from tests.support.served import kernelized, swapped

pytestmark = pytest.mark.usefixtures("registered")
# kernels are no patches where their windows overlap or leave gaps; for others something else stands against it
OTHERS = {
    "one point": (nn.Conv2d(3, 8, 1), "its patches are single points"),
    "padding": (nn.Conv2d(3, 8, 4, 4, padding=1), "it pads by (1, 1)"),
    "groups": (nn.Conv2d(4, 8, 4, 4, groups=2), "it has groups or gaps"),
    "gaps": (nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4), dilation=(1, 2, 1)), "it has groups or gaps"),
}


@pytest.mark.parametrize("name", ["clip", "qwen2_vl"])
def test_a_tower_trains_without_a_convolution(name) -> None:
    """Values and gradients are compared in whole_models."""
    model = kernelized(name)
    assert swapped(model, PATCHES.name) == {True}
    launches = launched(lambda: zoo.loss(model(**zoo.inputs(name, model))).backward())
    assert not [operator for operator in launches if "conv" in operator]


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_embedding_of_patches_keeps_its_forward_and_says_why(name) -> None:
    conv, reason = OTHERS[name]
    model = kernels_ext_npu.kernelize(nn.Sequential(copy.deepcopy(conv)).to("npu"))
    (row,) = kernels_ext_npu.report(model)
    assert (row.swapped, row.reason, row.is_candidate) == (False, reason, False)


def test_convolutions_whose_windows_overlap_are_nothing_to_report() -> None:
    model = kernels_ext_npu.kernelize(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, 2, 1)).to("npu"))
    assert not list(kernels_ext_npu.report(model))


@pytest.mark.parametrize("change", [{"padding": (1, 1)}, {"stride": (2, 2)}, {"dilation": (2, 2)}], ids=str)
def test_what_is_changed_after_the_swap_counts_in_the_next_call(change) -> None:
    conv = nn.Conv2d(3, 8, 4, 4)
    ours = kernels_ext_npu.kernelize(nn.Sequential(copy.deepcopy(conv)).to("npu"))
    for name, value in change.items():
        for each in (conv, ours[0]):
            setattr(each, name, value)
    x = torch.randn(2, 3, 16, 16)
    assert_near(ours(x.npu()), conv(x))


@pytest.mark.parametrize("shape", [(2, 3, 3, 8), (2, 4, 8, 8), (8, 8)], ids=str)
def test_wrong_shapes_raise_what_a_convolution_raises(shape) -> None:
    ours = kernels_ext_npu.kernelize(nn.Sequential(nn.Conv2d(3, 8, 4, 4)).to("npu"))
    with pytest.raises(RuntimeError, match=r"(?i)input"):
        ours(torch.randn(shape).npu())
