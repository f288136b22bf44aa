"""The recurrence of every channel by itself, against one in float64, and the unit of RecurrentGemma around it."""

from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels_ext_npu.selftest.layers import bare_modules
from tests.support import npu_counts
from tests.support.nearness import TOLERANCE

# a rounding of float32 for every step that a state lives through, which decays of up to 1 let be many
ROUNDINGS = 100 * 2.0**-24


def truth(decays: Tensor, added: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    states = []
    for a, b in zip(decays.unbind(1), added.unbind(1)):
        state = a * state + b
        states.append(state)
    return torch.stack(states, 1), state


def draw(seed: int, batch: int, length: int) -> list[Tensor]:
    """Decays up to 1, of which one of five is 0, as where a sequence begins; and a state before."""
    generator = torch.Generator().manual_seed(seed)
    decays = (1.25 * torch.rand(batch, length, 5, generator=generator) - 0.25).clamp(min=0)
    return [decays, *(torch.randn(*size, 5, generator=generator) for size in ((batch, length), (batch,)))]


def results(found: tuple[Tensor, Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """Return results, the state, and the gradients of all arguments."""
    loss = sum((y * torch.linspace(-9, 9, y.numel()).sin().view(y.shape).to(y)).sum() for y in found)
    return [*(y.detach() for y in found), *torch.autograd.grad(loss, leaves)]


@given(
    st.integers(0, 2**16), st.integers(1, 2), st.one_of(st.sampled_from([1, 31, 32, 33, 64, 65]), st.integers(1, 99))
)
@settings(max_examples=15, deadline=None)
def test_states_and_gradients_are_those_of_float64(kernel: ModuleType, seed: int, batch: int, length: int) -> None:
    exact, moved = ([fit(x).requires_grad_() for x in draw(seed, batch, length)] for fit in (Tensor.double, Tensor.npu))
    found = results(kernel.linear_recurrence(*moved), moved)
    for ours, wanted in zip(found, results(truth(*exact), exact), strict=True):
        assert (ours.cpu().double() - wanted).norm() <= ROUNDINGS * max(float(wanted.norm()), wanted.numel() ** 0.5)


@pytest.mark.parametrize(("tokens", "most"), [(1, 1), (2, 12), (5, 18)])
def test_few_tokens_are_few_launches(kernel: ModuleType, tokens: int, most: int) -> None:
    """A step of decoding is one; others are two of each token, and what brings the tokens into steps and back."""
    tensors = [x.npu() for x in draw(5, 2, tokens)]
    npu_counts.reset()
    kernel.linear_recurrence(*tensors)
    assert 0 < sum(npu_counts.read().values()) <= most


def test_what_does_not_fit_is_refused(kernel: ModuleType) -> None:
    decays, added, state = draw(3, 2, 4)
    for wrong in ((decays[:, :3], added), (decays, added, state[:1])):
        with pytest.raises(ValueError, match="have to fit"):
            kernel.linear_recurrence(*wrong)
    with pytest.raises(TypeError, match="added must be floating point"):
        kernel.linear_recurrence(decays, added.long())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_unit_of_recurrent_gemma_gives_what_transformers_gives(kernel: ModuleType, dtype: torch.dtype) -> None:
    """Whole sequences, with one that begins in the middle of a row, and tokens behind their state."""
    torch.manual_seed(0)
    original = bare_modules.recurrent_unit(2, 8).to(dtype)
    for parameter in original.parameters():
        torch.nn.init.normal_(parameter)
    ours = bare_modules.recurrent_unit(2, 8).to(dtype)
    ours.load_state_dict(original.state_dict())
    ours.npu()
    x = torch.randn(2, 43, 8, dtype=dtype)
    positions = torch.cat([torch.arange(12), torch.arange(31)]).expand(2, -1)
    for start, end in ((0, 40), (40, 41), (41, 43)):
        outs = []
        for module, forward in ((original, type(original).forward), (ours, kernel.layers.RGLRU.forward)):
            device = module.recurrent_param.device
            given = x[:, start:end].to(device).requires_grad_()
            out = forward(module, given, positions[:, start:end].to(device))
            grads = torch.autograd.grad(out.float().square().sum(), [given, *module.parameters()])
            module.recurrent_states = module.recurrent_states.detach()
            outs.append([x.detach().cpu().float() for x in (out, module.recurrent_states, *grads)])
        for found, wanted in zip(*outs):
            limit = {torch.float32: TOLERANCE, torch.bfloat16: 2.0**-6}[dtype]  # of numbers with 8 bits, several times
            assert (found - wanted).norm() <= limit * wanted.norm().clamp(min=1)
