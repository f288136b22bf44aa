"""The causal convolutions against transformers' functions, token by token, and what they launch and refuse."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.support import npu_counts


def draw(*shapes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 2])
def test_new_tokens_give_what_they_give_behind_all_others(kernel: ModuleType, dtype: torch.dtype, length: int) -> None:
    x, weight = draw((2, 5, 12), (5, 4), dtype=dtype)
    whole = kernel.causal_conv1d_fn(x.npu(), weight.npu(), activation="silu")
    state = x[..., : 12 - length][..., -4:].npu().clone()
    y = kernel.causal_conv1d_update(x[..., -length:].npu(), state, weight.npu(), activation="silu")
    assert torch.equal(y, whole[..., -length:])
    assert torch.equal(state.cpu(), x[..., -4:])


def test_one_launch_is_the_convolution_and_one_the_activation(kernel: ModuleType) -> None:
    x, weight = (t.npu() for t in draw((1, 6, 20), (6, 4), dtype=torch.bfloat16))
    npu_counts.reset()
    kernel.causal_conv1d_fn(x, weight, activation="silu")
    assert sum(npu_counts.read().values()) == 2


def test_what_does_not_fit_is_refused(kernel: ModuleType) -> None:
    x, weight, state = draw((2, 5, 3), (5, 4), (2, 5, 2), dtype=torch.float32)
    with pytest.raises(ValueError, match="activation 'softmax' must be one of"):
        kernel.causal_conv1d_fn(x, weight, activation="softmax")
    with pytest.raises(ValueError, match=r"weight \[4, 5\]"):
        kernel.causal_conv1d_fn(x, weight.t())
    with pytest.raises(ValueError, match="conv_state"):
        kernel.causal_conv1d_update(x, state, weight)
    with pytest.raises(ValueError, match=r"bias \[1\] must be \[C\], here \[5\]"):
        kernel.causal_conv1d_fn(x, weight, weight[0, :1])
    with pytest.raises(TypeError, match=r"seq_idx must be int32 or int64, got torch.uint8"):
        kernel.causal_conv1d_fn(x, weight, seq_idx=torch.zeros(2, 3, dtype=torch.uint8))


@pytest.mark.parametrize("sizes", [(2, 5, 0), (0, 5, 3), (2, 0, 3)])
def test_of_no_tokens_there_is_nothing(kernel: ModuleType, sizes: tuple[int, ...]) -> None:
    x, weight, state = torch.zeros(sizes), torch.ones(sizes[1], 4), torch.ones(*sizes[:2], 4)
    assert kernel.causal_conv1d_fn(x.npu(), weight.npu()).shape == sizes
    assert kernel.causal_conv1d_update(x.npu(), state := state.npu(), weight.npu()).shape == sizes
    assert (state == 1).all()
