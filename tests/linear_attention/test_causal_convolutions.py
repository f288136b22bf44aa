"""The causal convolutions against a sum of products in float64, and transformers' functions."""

from types import ModuleType

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next

import softnpu

# one rounding of the result, and one of what goes into the activation; sums of a few products in float32
ROUNDING = {torch.float32: 2.0**-21, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def truth(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Σ_k weight[:, k] x[..., t - (K - 1) + k] in float64, with zeros before the first token."""
    x, weight = x.double(), weight.double()
    y = torch.zeros_like(x)
    for k in range(weight.shape[1]):
        ago = weight.shape[1] - 1 - k
        if ago < x.shape[-1]:
            y[..., ago:] += weight[:, k : k + 1] * x[..., : x.shape[-1] - ago]
    y = y if bias is None else y + bias.double().unsqueeze(-1)
    return y if activation is None else y * y.sigmoid()


def draw(*shapes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("length", [1, 3, 9])
@pytest.mark.parametrize(("with_bias", "activation"), [(False, "silu"), (True, "swish"), (True, None)])
def test_values_and_gradients_are_those_of_float64(
    kernel: ModuleType, dtype: torch.dtype, length: int, with_bias: bool, activation: str | None
) -> None:
    x, weight, bias, grad = draw((2, 5, length), (5, 4), (5,), (2, 5, length), dtype=dtype)
    given = [x, weight, *([bias] if with_bias else [])]
    leaves = [t.npu().requires_grad_() for t in given]
    exact = [t.double().requires_grad_() for t in given]
    y = kernel.causal_conv1d_fn(
        leaves[0].transpose(0, 1).contiguous().transpose(0, 1), *leaves[1:], activation=activation
    )
    expected = truth(exact[0], exact[1], exact[2] if with_bias else None, activation)
    found, wanted = torch.autograd.grad(y, leaves, grad.npu()), torch.autograd.grad(expected, exact, grad.double())
    for ours, other in zip((y, *found), (expected, *wanted)):
        assert ours.dtype == dtype
        atol = 2 * ROUNDING[dtype] * max(1.0, float(other.abs().max()))
        torch.testing.assert_close(ours.cpu().double(), other, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 2])
def test_new_tokens_give_what_they_give_behind_all_others(kernel: ModuleType, dtype: torch.dtype, length: int) -> None:
    x, weight = draw((2, 5, 12), (5, 4), dtype=dtype)
    whole = kernel.causal_conv1d_fn(x.npu(), weight.npu(), activation="silu")
    state = x[..., : 12 - length][..., -4:].npu().clone()
    y = kernel.causal_conv1d_update(x[..., -length:].npu(), state, weight.npu(), activation="silu")
    assert torch.equal(y, whole[..., -length:])
    assert torch.equal(state.cpu(), x[..., -4:])


@pytest.mark.parametrize("update", [False, True])
def test_they_give_the_bits_of_transformers_functions(kernel: ModuleType, update: bool) -> None:
    x, weight, bias, before = draw((2, 6, 7), (6, 4), (6,), (2, 6, 4), dtype=torch.bfloat16)
    name = "causal_conv1d_update" if update else "causal_conv1d_fn"
    ours, theirs = before.clone(), before.clone()
    found = getattr(kernel, name)(x, *([ours] if update else []), weight, bias, "silu")
    expected = getattr(modeling_qwen3_next, name)(x, *([theirs] if update else []), weight, bias, "silu")
    assert torch.equal(found, expected)
    assert torch.equal(ours, theirs)


def test_one_launch_is_the_convolution_and_one_the_activation(kernel: ModuleType) -> None:
    x, weight = (t.npu() for t in draw((1, 6, 20), (6, 4), dtype=torch.bfloat16))
    softnpu.reset_counters()
    kernel.causal_conv1d_fn(x, weight, activation="silu")
    assert sum(softnpu.counters().values()) == 2


def test_what_does_not_fit_is_refused(kernel: ModuleType) -> None:
    x, weight, state = draw((2, 5, 3), (5, 4), (2, 5, 2), dtype=torch.float32)
    with pytest.raises(ValueError, match="activation 'softmax' must be one of"):
        kernel.causal_conv1d_fn(x, weight, activation="softmax")
    with pytest.raises(ValueError, match=r"weight \[4, 5\]"):
        kernel.causal_conv1d_fn(x, weight.t())
    with pytest.raises(ValueError, match="conv_state"):
        kernel.causal_conv1d_update(x, state, weight)
