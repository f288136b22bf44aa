"""aten on the software device against the CPU: torch's own samples for all of its operators.

What the device cannot do, or does in another way than the CPU, is in data/operators.toml with a reason each; a line
there that is no longer true fails.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

from tests.softnpu.operators import agree, call, compare, differentiable, dtypes, on_npu, operator_id, samples

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EXCEPTIONS = tomllib.loads((Path(__file__).parent.parent / "data" / "operators.toml").read_text())


def operators(check: str) -> list[Any]:
    params = []
    for op in op_db:
        reason = EXCEPTIONS[check].get(operator_id(op))
        marks = [pytest.mark.xfail(reason=reason, strict=True)] if reason else []
        params.append(pytest.param(op, id=operator_id(op), marks=marks))
    return params


@pytest.mark.parametrize("op", operators("forward"))
def test_forward(op: OpInfo) -> None:
    for dtype in dtypes(op):
        for sample in samples(op, dtype):
            agree(op, sample, call(op, on_npu(sample)), call(op, sample), partial(call, op))


@pytest.mark.parametrize("op", operators("backward"))
def test_backward(op: OpInfo) -> None:
    for dtype in dtypes(op):
        if not op.supports_autograd or dtype not in op.supported_backward_dtypes("cpu"):
            continue
        for sample in samples(op, dtype, requires_grad=True):
            found, expected = gradients(op, dtype, on_npu(sample)), gradients(op, dtype, sample)
            assert [g is None for g in found] == [g is None for g in expected]
            agree(op, sample, found, expected, partial(gradients, op, dtype))


def gradients(op: OpInfo, dtype: torch.dtype, sample: SampleInput) -> list[torch.Tensor | None]:
    """Of all arguments that require one, for gradients of the results that the dtype has, whatever the device."""
    arguments = differentiable((sample.input, sample.args, sample.kwargs))
    results = [r for r in differentiable(call(op, sample)) if r.is_floating_point() or r.is_complex()]
    if not arguments or not results:
        return []
    ramps = [torch.linspace(-1, 1, r.numel()).to(dtype).reshape(r.shape).to(r) for r in results]
    return list(torch.autograd.grad(results, arguments, ramps, allow_unused=True))


@pytest.mark.parametrize("op", operators("in_place"))
def test_in_place_writes_through_a_view(op: OpInfo) -> None:
    for dtype in dtypes(op) if op.inplace_variant else ():
        for sample in samples(op, dtype):
            if not sample.broadcasts_input and isinstance(sample.input, torch.Tensor):
                found, expected = (written_in_place(op, side) for side in (on_npu(sample), sample))
                assert (found is None) == (expected is None)
                agree(op, sample, found, expected, partial(written_in_place, op))


def written_in_place(op: OpInfo, sample: SampleInput) -> torch.Tensor | None:
    """Two copies of the input, interleaved, of which the second was written to; None if that is refused."""
    base = torch.stack([sample.input.detach(), sample.input.detach()], dim=-1)
    try:
        call(op.inplace_variant, SampleInput(base[..., 1], args=sample.args, kwargs=sample.kwargs))
    except RuntimeError:  # the result has another dtype or shape than the input
        return None
    return base


@pytest.mark.parametrize("op", operators("out"))
def test_out_writes_through_views_and_grows_empty_tensors(op: OpInfo) -> None:
    for dtype in dtypes(op) if op.supports_out else ():
        for sample in samples(op, dtype):
            expected = call(op, sample)
            if not isinstance(expected, torch.Tensor) or expected.layout != torch.strided:
                continue
            sample.kwargs["out"] = torch.empty(0, dtype=expected.dtype)
            try:
                call(op, sample)
            except RuntimeError:  # the CPU does not grow this one
                continue
            del sample.kwargs["out"]
            moved = on_npu(sample)
            base = torch.zeros(*expected.shape, 2, dtype=expected.dtype, device="npu")
            moved.kwargs["out"] = base[..., 1]
            call(op, moved)
            agree(op, sample, base[..., 1], expected, partial(call, op))
            assert not base[..., 0].any()
            moved.kwargs["out"] = torch.empty(0, dtype=expected.dtype, device="npu")
            agree(op, sample, call(op, moved), expected, partial(call, op))


def test_random_operators_follow_the_generator_of_the_device() -> None:
    torch.manual_seed(3)
    state = torch.npu.get_rng_state()
    first, second = torch.rand(9, device="npu"), torch.rand(9, device="npu")
    assert not torch.equal(first, second)
    torch.npu.set_rng_state(state)
    compare([torch.rand(9, device="npu"), torch.rand(9, device="npu")], [first.cpu(), second.cpu()])


def test_no_exception_names_an_operator_that_does_not_exist() -> None:
    names = {operator_id(op) for op in op_db}
    assert {name for table in EXCEPTIONS.values() for name in table} <= names


def test_at_least_250_operators_run_forward_and_backward() -> None:
    excluded = {name.partition(".")[0] for check in ("forward", "backward") for name in EXCEPTIONS[check]}
    assert len({op.name for op in op_db if op.supports_autograd} - excluded) >= 250
