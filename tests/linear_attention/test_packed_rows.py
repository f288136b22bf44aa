"""Sequences packed into one row: each gives what it gives alone."""

import itertools
from importlib import import_module
from types import ModuleType

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernels_ext_npu.selftest.functions.linear_attention import delta_rule
from tests.linear_attention.delta_rule_inputs import draw
from tests.support import npu_counts

FUNCTIONS = {False: "chunk_gated_delta_rule", True: "chunk_kda"}
OPTIONS = {"use_qk_l2norm_in_kernel": True}
ROUNDED = 1e-5  # from float64, alone: a few roundings in float32 of values of size one


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = ROUNDED) -> None:
    largest = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(found.cpu().double(), expected.cpu().double(), rtol=0, atol=tolerance * largest)


def rounded_decays(g: torch.Tensor) -> float:
    """By how much decays are off: each is the difference of two sums of gates in a chunk, and those are rounded."""
    return 2 * 2.0**-24 * max(float(chunk.sum(1).abs().max()) for chunk in g.split(64, 1))


def cu_seqlens_from(lengths: list[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


@pytest.mark.parametrize("by_channel", [False, True], ids=["gdn", "kda"])
@given(
    lengths=st.lists(st.one_of(st.integers(1, 9), st.sampled_from([0, 63, 64, 65, 70])), min_size=1, max_size=6),
    gates=st.sampled_from(["small", "large"]),
    by_number=st.booleans(),
    budget=st.sampled_from([None, 1]),  # of a segment, which knows the sequence before it
    seed=st.integers(0, 2**16),
)
@example(lengths=[1, 1, 70, 1], gates="large", by_number=False, budget=None, seed=4192)
@example(lengths=[1, 1, 63, 63, 63, 65], gates="large", by_number=False, budget=1, seed=2548)  # sums up to 3,600
@settings(max_examples=25, deadline=None)
def test_a_sequence_gives_what_it_gives_alone(
    kernel: ModuleType, by_channel: bool, lengths: list[int], gates: str, by_number: bool, budget: int | None, seed: int
) -> None:
    ends = cu_seqlens_from(lengths)
    if ends[-1] == 0:
        return
    function = getattr(kernel, FUNCTIONS[by_channel])
    tensors = [x.npu() for x in draw(seed, (1, ends[-1], 1, 2, 8, 12), by_channel, gates)]
    weights = torch.randn(1, ends[-1], 2, 12, generator=torch.Generator().manual_seed(seed)).npu()
    packed = [x.clone().requires_grad_() for x in tensors]
    bounds = torch.tensor(ends, device="npu", dtype=torch.int32)
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).unsqueeze(0).npu()
    given = {"seq_idx": numbers} if by_number else {"cu_seqlens": bounds}
    tolerance = max(ROUNDED, rounded_decays(tensors[3]))
    npu_counts.reset()
    with pytest.MonkeyPatch.context() as patch:
        if budget:
            patch.setattr(import_module(f"{kernel.__name__}.delta_rule.autograd"), "BUDGET", budget)
        out, states = function(*packed, output_final_state=True, **given, **OPTIONS)
        found = torch.autograd.grad(out, packed, weights)
    calls = npu_counts.read()
    assert calls.get("stream_syncs", 0) == calls.get("device_to_host_copies", 0) == 0
    for number, (start, end) in enumerate(itertools.pairwise(ends)):
        if start == end:
            continue
        alone = [x[:, start:end].cpu().double().requires_grad_() for x in tensors]
        expected, state = delta_rule(*alone)
        close(out[:, start:end], expected, tolerance)
        if not by_number:
            close(states[number], state[0], tolerance)
        elif end == ends[-1]:
            close(states[0], state[0], tolerance)
        for ours, wanted in zip(found, torch.autograd.grad(expected, alone, weights[:, start:end].cpu().double())):
            close(ours[:, start:end], wanted, tolerance)


@pytest.mark.parametrize("by_channel", [False, True], ids=["gdn", "kda"])
def test_nothing_crosses_a_bound(kernel: ModuleType, by_channel: bool) -> None:
    """Not even what is no number."""
    function = getattr(kernel, FUNCTIONS[by_channel])
    tensors = draw(2, (1, 100, 1, 1, 8, 8), by_channel)
    tensors[2][:, :30] = 1e30
    out, _ = function(*(x.npu() for x in tensors), cu_seqlens=torch.tensor([0, 30, 100], device="npu"), **OPTIONS)
    alone, _ = function(*(x[:, 30:].npu() for x in tensors), **OPTIONS)
    close(out[:, 30:], alone)


@pytest.mark.long
@pytest.mark.parametrize("by_channel", [False, True])
def test_compiled_they_are_one_graph_that_gives_the_same(kernel: ModuleType, by_channel: bool) -> None:
    """The same operators but for where states are written: to a rounding or two."""
    torch.compiler.reset()
    function, bounds = getattr(kernel, FUNCTIONS[by_channel]), torch.tensor([0, 30, 70], device="npu")

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        out, state = function(*tensors, cu_seqlens=bounds, output_final_state=True, **OPTIONS)
        return out.sum() + state.sum()

    found = []
    for each in (torch.compile(call, fullgraph=True, backend="aot_eager"), call):
        leaves = [x.npu().requires_grad_() for x in draw(1, (1, 70, 1, 2, 8, 8), by_channel)]
        y = each(*leaves)
        found.append([y.detach(), *torch.autograd.grad(y, leaves)])
    for ours, wanted in zip(*found):
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)


def test_rows_of_numbered_sequences_are_taken_by_themselves(kernel: ModuleType) -> None:
    tensors = [x.npu() for x in draw(3, (2, 80, 1, 1, 8, 8), False)]
    numbers = torch.zeros(2, 80, dtype=torch.int32)
    numbers[0, 50:], numbers[1, 70:] = 1, 1
    out, _ = kernel.chunk_gated_delta_rule(*tensors, seq_idx=numbers.npu(), **OPTIONS)
    for row, end in ((0, 50), (1, 70)):
        for part in (slice(0, end), slice(end, 80)):
            alone, _ = kernel.chunk_gated_delta_rule(*(x[row : row + 1, part] for x in tensors), **OPTIONS)
            close(out[row : row + 1, part], alone)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cu_seqlens": torch.tensor([0, 4])}, "pack all sequences into one row"),
        ({"seq_idx": torch.zeros(2, 5, dtype=torch.int32)}, "seq_idx"),
        ({"seq_idx": torch.zeros(2, 4, dtype=torch.int32), "initial_state": torch.zeros(2, 1, 8, 8)}, "state of zeros"),
    ],
)
def test_what_packed_rows_cannot_have_is_refused(kernel: ModuleType, options: dict, message: str) -> None:
    tensors = draw(5, (2, 4, 1, 1, 8, 8), False)
    with pytest.raises(ValueError, match=message):
        kernel.chunk_gated_delta_rule(*tensors, **options)
    if "initial_state" not in options:
        with pytest.raises(ValueError, match=message):
            kernel.causal_conv1d_fn(torch.zeros(2, 3, 4), torch.zeros(3, 4), **options)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_convolution_sees_its_own_sequence_alone(kernel: ModuleType, activation: str | None, dtype) -> None:
    """Where one rounding at the end is all: float32 sums of four products, in another order than a convolution's."""
    generator = torch.Generator().manual_seed(6)
    x, weight, bias, grad = (torch.randn(s, generator=generator) for s in ((1, 6, 20), (6, 4), (6,), (1, 6, 20)))
    ends = [0, 1, 3, 9, 20]
    leaves = [t.to(dtype).npu().requires_grad_() for t in (x, weight, bias)]
    out = kernel.causal_conv1d_fn(*leaves, activation, cu_seqlens=torch.tensor(ends, device="npu"))
    found = torch.autograd.grad(out, leaves, grad.to(dtype).npu())
    exact = [t.to(dtype).double().requires_grad_() for t in (x, weight, bias)]
    parts = [kernel.causal_conv1d_fn(exact[0][..., a:b], *exact[1:], activation) for a, b in itertools.pairwise(ends)]
    expected = torch.cat(parts, -1)
    wanted = torch.autograd.grad(expected, exact, grad.to(dtype).double())
    rounding = 1e-6 if dtype == torch.float32 else 2.0**-7
    for ours, truth in zip((out, *found), (expected, *wanted)):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.cpu().double(), truth, rtol=rounding, atol=rounding * float(truth.abs().max()))
