"""The selective scan against a recurrence in float64, and against transformers' function, which is not to be nearer."""

import itertools
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from transformers.models.mamba import modeling_mamba

from kernels_ext_npu.measuring.costs import Cost
from tests.linear_attention.test_delta_rules import FURTHER, ROUNDINGS, away

NAMES = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")
OPTIONAL = NAMES[5:]


def draw(seed: int, batch: int, length: int, fades: float = 1.0, dtype: torch.dtype = torch.float32, channels: int = 6):
    """All arguments by name; a state fades by up to ``exp(-fades e² Δ)`` a token."""
    generator, states = torch.Generator().manual_seed(seed), 4
    tokens, projections = (batch, channels, length), (batch, states, length)
    shapes = (tokens, tokens, (channels, states), projections, projections, (channels,), tokens, (channels,))
    drawn = dict(zip(NAMES, (torch.randn(shape, generator=generator) for shape in shapes)))
    drawn["A"] = -fades * torch.exp(2 * drawn["A"])
    return {name: x if name in ("A", "D", "delta_bias") else x.to(dtype) for name, x in drawn.items()}


def truth(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=True):  # noqa: N803
    """One token after the other: equation 2 of "Mamba" (arXiv 2312.00752), with Δ B for the discrete B."""
    delta = delta if delta_bias is None else delta + delta_bias[:, None]
    delta = (1 + delta.exp()).log() if delta_softplus else delta
    state, results = u.new_zeros(u.shape[0], *A.shape), []
    for t in range(u.shape[2]):
        state = (delta[:, :, t, None] * A).exp() * state + (delta * u)[:, :, t, None] * B[:, None, :, t]
        results.append((state * C[:, None, :, t]).sum(-1))
    y = torch.stack(results, -1)
    y = y if D is None else y + D[:, None] * u
    return (y if z is None else y * z * z.sigmoid()), state


def results_and_gradients(function, tensors: dict[str, Tensor], weights: list[Tensor], **options) -> dict:
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    out, state = function(*list(leaves.values())[:5], **{n: x for n, x in leaves.items() if n in OPTIONAL}, **options)
    loss = sum((y * w.to(y)).sum() for y, w in zip((out, state), weights))
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    found = {"result": out, "state": state} | {f"gradient of {name}": x for name, x in zip(leaves, grads)}
    return {name: torch.zeros(()) if x is None else x.detach().cpu() for name, x in found.items()}


lengths = st.one_of(st.sampled_from([1, 2, 31, 32, 33, 64, 65]), st.integers(1, 100))


@given(
    seed=st.integers(0, 2**16),
    batch=st.integers(1, 2),
    length=lengths,
    fades=st.sampled_from([0.01, 1.0, 30.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    left_out=st.sets(st.sampled_from(OPTIONAL)),
    strided=st.booleans(),
    softplus=st.booleans(),
)
@settings(max_examples=12, deadline=None)
def test_results_states_and_gradients_are_as_near_to_float64_as_those_of_transformers(
    kernel: ModuleType, seed, batch, length, fades, dtype, left_out, strided, softplus
) -> None:
    tensors = {name: x for name, x in draw(seed, batch, length, fades, dtype).items() if name not in left_out}
    if not softplus:
        tensors["delta"] = tensors["delta"].abs()
        tensors.pop("delta_bias", None)
    options = {"delta_softplus": softplus}
    generator, states = torch.Generator().manual_seed(1), (batch, *tensors["A"].shape)
    weights = [torch.randn(size, generator=generator) for size in (tensors["u"].shape, states)]
    weights = [w.to(dtype).float() for w in weights]  # what a gradient of that dtype can say
    exact = results_and_gradients(truth, {name: x.double() for name, x in tensors.items()}, weights, **options)
    options["return_last_state"] = True
    on_npu = {name: x.npu() for name, x in tensors.items()}
    if strided:  # as the models give them: channels last
        on_npu = {n: x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 3 else x for n, x in on_npu.items()}
    found = results_and_gradients(kernel.selective_scan_fn, on_npu, weights, **options)
    known = results_and_gradients(modeling_mamba.mamba_selective_scan, tensors, weights, **options)
    assert found["result"].dtype == dtype
    assert found["state"].dtype == torch.float32
    for name, wanted in exact.items():
        assert found[name].shape == known[name].shape, name
        rounding = torch.finfo(found[name].dtype).eps  # ours are in the dtype of the tokens, theirs in float32
        assert away(found[name], wanted) <= FURTHER * away(known[name], wanted) + ROUNDINGS + rounding, name


@pytest.mark.long
def test_launches_and_bytes_grow_with_the_tokens_and_not_with_their_square(kernel: ModuleType) -> None:
    """At the sizes of Mamba-2.8B; with transformers' function a step of 2,048 tokens moves 11,026 GB."""
    counted = []
    for tokens in (2048, 4096, 8192, 16384):
        with FakeTensorMode(allow_non_fake_inputs=True):
            sizes = {"u": (1, 5120, tokens), "B": (1, 16, tokens), "A": (5120, 16), "D": (5120,)}
            like = {"delta": "u", "z": "u", "C": "B", "delta_bias": "D"}
            kinds = {name: torch.float32 if name in ("A", "D", "delta_bias") else torch.bfloat16 for name in NAMES}
            tensors = {
                name: torch.randn(sizes[like.get(name, name)], dtype=kinds[name], device="npu", requires_grad=True)
                for name in NAMES
            }
            with Cost() as step:
                kernel.selective_scan_fn(**tensors, delta_softplus=True).sum().backward()
        counted.append((step.launches.total(), step.bytes.total()))
    assert counted[1][0] <= 520
    assert counted[1][1] <= 78e9
    for one, other in itertools.pairwise(counted):
        assert all(b <= 2.1 * a for a, b in zip(one, other))


def test_there_may_be_no_row(kernel: ModuleType) -> None:
    tensors = {name: x[:0] if x.dim() == 3 else x for name, x in draw(8, 1, 9).items()}
    assert kernel.selective_scan_fn(**tensors).shape == tensors["u"].shape


@pytest.mark.parametrize(
    ("change", "message"),
    [({"B": (1, 5, 3)}, "have to fit"), ({"z": (1, 6, 4)}, "have to fit"), ({"u": (1, 6, 0)}, "have to fit")],
)
def test_what_does_not_fit_is_refused(kernel: ModuleType, change: dict, message: str) -> None:
    tensors = draw(9, 1, 3) | {name: torch.zeros(shape) for name, shape in change.items()}
    with pytest.raises(ValueError, match=message):
        kernel.selective_scan_fn(**tensors)
    with pytest.raises(TypeError, match="C must be floating point"):
        kernel.selective_scan_fn(**draw(9, 1, 3) | {"C": torch.zeros(1, 4, 3, dtype=torch.long)})
