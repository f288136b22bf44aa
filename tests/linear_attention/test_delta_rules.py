"""The delta rules against a recurrence in float64, and against transformers' functions, which are not to be nearer."""

from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.qwen3_next import modeling_qwen3_next

from kernels_ext_npu.selftest.functions.linear_attention import delta_rule
from tests.linear_attention.delta_rule_inputs import draw

FUNCTIONS = {False: "chunk_gated_delta_rule", True: "chunk_kda"}
STEPS = {False: "fused_recurrent_gated_delta_rule", True: "fused_recurrent_kda"}
THEIRS = {
    False: modeling_qwen3_next.torch_chunk_gated_delta_rule,
    True: modeling_kimi_linear.chunk_kimi_delta_attention,
}
# Both are off by roundings of float32 that accumulate in other orders, so that one is nearer here and the other there:
# up to three times as far, and a hundred roundings where theirs happens to be nearer than that.
FURTHER, ROUNDINGS = 3, 100 * 2.0**-24

lengths = st.one_of(st.sampled_from([1, 2, 63, 64, 65, 127, 128, 129, 192]), st.integers(1, 300))
cases = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**16),
        "gates": st.sampled_from(["none", "small", "large"]),
        "betas": st.sampled_from(["any", "zero", "one", "mixed"]),
        "keys": st.sampled_from(["any", "equal", "near"]),
        "dtype": st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    }
)


def away(found: Tensor, exact: Tensor) -> float:
    """How far a tensor is from the truth, in parts of its norm or that of as many ones, the size of what is given."""
    return (found.detach().cpu().double() - exact).norm().item() / max(exact.norm().item(), exact.numel() ** 0.5)


def results_and_gradients(function, tensors: list[Tensor], weights: list[Tensor], **options) -> list[Tensor]:
    """What a function gives, and the gradients of its arguments, of which the sixth is the state, if there is one."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    state = leaves[5] if len(leaves) > 5 else None
    out, last = function(*leaves[:5], **{"initial_state": state, **options})
    loss = sum((y * w.to(y)).sum() for y, w in zip((out, last), weights))
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [out, last, *(torch.zeros_like(x) if grad is None else grad for grad, x in zip(found, leaves))]


def truth(tensors: list[Tensor], weights: list[Tensor], normalised: bool) -> list[Tensor]:
    def function(*given: Tensor, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
        return delta_rule(*given, initial_state, normalised)

    return results_and_gradients(function, [x.double() for x in tensors], [w.double() for w in weights])


@pytest.mark.parametrize("by_channel", [False, True], ids=["gdn", "kda"])
@given(length=lengths, heads=st.sampled_from([(1, 1, 8, 8), (2, 2, 16, 8), (1, 3, 8, 12)]), case=cases, data=st.data())
@settings(max_examples=25, deadline=None)
def test_results_states_and_gradients_are_as_near_to_float64_as_those_of_transformers(
    kernel: ModuleType, by_channel: bool, length: int, heads: tuple[int, int, int, int], case: dict, data
) -> None:
    batch = data.draw(st.integers(1, 2))
    tensors = draw(shape=(batch, length, *heads), by_channel=by_channel, **case)
    groups, many, key, value = heads
    generator = torch.Generator().manual_seed(case["seed"])
    if data.draw(st.booleans()):
        tensors.append(torch.randn(batch, many, key, value, generator=generator))
    weights = [
        torch.randn(size, generator=generator) for size in ((batch, length, many, value), (batch, many, key, value))
    ]
    exact = truth(tensors, weights, True)
    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    on_npu = [strided(tensor.npu(), data.draw(st.booleans())) for tensor in tensors]
    found = results_and_gradients(getattr(kernel, FUNCTIONS[by_channel]), on_npu, weights, **options)

    def theirs(q: Tensor, k: Tensor, *rest: Tensor, **options) -> tuple[Tensor, Tensor]:
        q, k = (x.repeat_interleave(many // groups, 2) for x in (q, k))
        return THEIRS[by_channel](q, k, *rest, **options)

    known = results_and_gradients(theirs, tensors, weights, **options)
    names = ("result", "state", "q", "k", "v", "g", "beta", "state before")
    for name, ours, other, wanted in zip(names, found, known, exact):
        assert ours.dtype == other.dtype, name
        assert ours.shape == other.shape, name
        assert away(ours, wanted) <= FURTHER * away(other, wanted) + ROUNDINGS, name


def strided(x: Tensor, apart: bool) -> Tensor:
    """The same values, with others between them."""
    return torch.stack([x, torch.full_like(x, float("nan"))], -1)[..., 0] if apart else x


@pytest.mark.parametrize("by_channel", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("normalised", [False, True])
def test_betas_of_two_keep_the_length_of_what_they_turn(kernel: ModuleType, by_channel: bool, normalised: bool) -> None:
    """With beta 2 and keys of length one each step is a reflection: errors do not grow, as float64 shows."""
    tensors = draw(3, (1, 130, 2, 2, 16, 16), by_channel, "none", "two")
    if not normalised:
        tensors[1] = torch.nn.functional.normalize(tensors[1], dim=-1)
    exact = delta_rule(*(x.double() for x in tensors), normalised=normalised)
    found = getattr(kernel, FUNCTIONS[by_channel])(
        *(x.npu() for x in tensors), output_final_state=True, use_qk_l2norm_in_kernel=normalised
    )
    assert all(away(ours, wanted) <= 1000 * 2.0**-24 for ours, wanted in zip(found, exact))


@pytest.mark.parametrize("by_channel", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("alike", [True, False], ids=["one gate", "other gates"])
@pytest.mark.parametrize("length", [1, 130, 192])
def test_the_gradient_of_gates_is_as_near_as_that_of_transformers_where_little_is_left_of_it(
    kernel: ModuleType, by_channel: bool, alike: bool, length: int
) -> None:
    """One token gives nothing through a gate, and a gate of -40 lets 4e-18 through: other terms must not drown that.

    Decays come from sums of gates of a chunk, 64, each rounded: a gradient of these decays is off by as much.
    """
    q, k, v, g, beta = draw(3, (3, length, 2, 2, 16, 16), by_channel)
    mean = torch.tensor([5.0, 12.0, 40.0]).view(-1, *[1] * (g.dim() - 1))  # of each row
    g = -mean.expand_as(g) if alike else mean * (g - 0.5)
    tensors, weights = [q, k, v, g, beta], [torch.randn(v.shape), torch.randn(3, 2, 16, 16)]
    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    function, on_npu = getattr(kernel, FUNCTIONS[by_channel]), [x.npu() for x in tensors]
    found = results_and_gradients(function, on_npu, weights, **options)
    known = results_and_gradients(THEIRS[by_channel], tensors, weights, **options)
    exact = truth(tensors, weights, True)[5]
    for row in range(len(mean)):
        ours, theirs = ((each[5][row].cpu().double() - exact[row]).norm() for each in (found, known))
        assert ours <= theirs
        assert ours <= (64 * -g[row].min() * 2.0**-24 + ROUNDINGS) * exact[row].norm()


@pytest.mark.parametrize("by_channel", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_token_after_another_is_the_recurrence(kernel: ModuleType, by_channel: bool, state: bool, dtype) -> None:
    """Steps of decoding, each from the state of the one before; a few roundings of float32 a step, one of the dtype."""
    tensors = draw(5, (2, 6, 1, 2, 8, 12), by_channel, dtype=dtype)
    first = torch.randn(2, 2, 8, 12) if state else None
    exact, last = delta_rule(*(x.double() for x in tensors), None if first is None else first.double())
    carried, results = None if first is None else first.npu(), []
    for t in range(6):
        one = [x[:, t : t + 1].npu() for x in tensors]
        out, carried = getattr(kernel, STEPS[by_channel])(
            *one, initial_state=carried, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        results.append(out)
    assert results[0].dtype == dtype
    assert carried.dtype == torch.float32
    assert away(torch.cat(results, 1), exact) <= (1e-6 if dtype == torch.float32 else 2.0**-8)
    assert away(carried, last) <= 1e-6


def test_there_may_be_no_row(kernel: ModuleType) -> None:
    tensors = [x[:0].npu() for x in draw(6, (2, 5, 2, 2, 8, 8), False)]
    assert kernel.chunk_gated_delta_rule(*tensors)[0].shape == (0, 5, 2, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": (2, 5, 3, 8)}, "have to fit"),
        ({"k": (2, 5, 2, 6)}, "have to fit"),
        ({"g": (2, 4, 2)}, "have to fit"),
        ({"initial_state": (2, 2, 8, 9)}, "initial_state"),
        ({"v": ()}, "have to fit"),
        ({"q": (2, 5, 2, 0), "k": (2, 5, 2, 0)}, "have to fit"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(kernel: ModuleType, change: dict, message: str) -> None:
    shapes = {"q": (2, 5, 2, 8), "k": (2, 5, 2, 8), "v": (2, 5, 2, 8), "g": (2, 5, 2), "beta": (2, 5, 2)} | change
    with pytest.raises(ValueError, match=message):
        kernel.chunk_gated_delta_rule(**{name: torch.zeros(shape) for name, shape in shapes.items()})


@pytest.mark.parametrize("by_channel", [False, True], ids=["gdn", "kda"])
def test_no_token_leaves_the_state_as_it_was(kernel: ModuleType, by_channel: bool) -> None:
    tensors, state = draw(0, (1, 0, 1, 2, 4, 6), by_channel), torch.randn(1, 2, 4, 6)
    out, last = getattr(kernel, FUNCTIONS[by_channel])(*tensors, initial_state=state, output_final_state=True)
    assert out.shape == (1, 0, 2, 6)
    assert torch.equal(last, state)
