"""Swap kernels into modules, and compare what these give with what their own forwards give."""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import kernels_ext_npu
from kernels_ext_npu.selftest.comparing import InPlaceOfFloat32, doubled


def swapped(*modules: nn.Module) -> list[nn.Module]:
    """Return copies on the device, each with its kernel: one call finds them all."""
    # beside a layer with weights: a model without any is on no device
    model = nn.ModuleDict({"of": nn.ModuleList(map(copy.deepcopy, modules)), "other": nn.Linear(2, 2)}).to("npu")
    rows = {row.path: row for row in kernels_ext_npu.report(kernels_ext_npu.kernelize(model))}
    for number, module in enumerate(modules):
        row = rows[f"of.{number}"]
        assert row.swapped, f"{type(module).__name__}: {row.reason}"
    return list(model["of"])


def results(module: nn.Module, *arguments: Tensor, call: Callable | None = None, **options: object) -> list:
    """Return the result or results, and the gradients of arguments and parameters; None for those that have none.

    Copies of the floating arguments have gradients. ``call`` takes them in place of the module.
    """
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in arguments]
    module.zero_grad()
    given = (module if call is None else call)(*leaves, **options)
    outputs = given if isinstance(given, tuple) else (given,)
    torch.autograd.backward(outputs, [torch.linspace(-1, 1, y.numel()).view(y.shape).to(y) for y in outputs])
    return [
        *(y.detach() for y in outputs),
        *(t.grad for t in leaves if t.requires_grad),
        *(p.grad for p in module.parameters()),
    ]


def assert_agree(found: Sequence[Tensor | None], expected: Sequence[Tensor | None], tolerance: float) -> None:
    """Compare dtypes, and values relative to the norm of each."""
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a.dtype == b.dtype
            assert (a.cpu().double() - b.double()).norm() <= tolerance * b.double().norm()


def in_float64(module: nn.Module, *arguments: Tensor, **options: object) -> list:
    """Return what `results` does of the same module in float64, also where it casts to float32."""
    with InPlaceOfFloat32(torch.float64):
        return results(copy.deepcopy(module).double(), *doubled(arguments), **options)


def assert_no_further(found: Sequence, own: Sequence, truth: Sequence, slack: float = 0, least: float = 0) -> None:
    """Compare dtypes, and distances from float64 with those of the original.

    They are root mean squares over all tensors, relative to the norm of each: single ones are too small to compare
    roundings by, and gradients of single numbers, which are sums that all but cancel, are left out. ``slack`` is what
    the distance of the original may be exceeded by, relative to it, and ``least`` is always allowed.
    """
    assert [None if t is None else t.dtype for t in found] == [None if t is None else t.dtype for t in own]
    compared = [place for place, t in enumerate(truth) if t is not None and t.numel() > 1]
    far, allowed = (
        torch.stack([(side[i].cpu().double() - truth[i]).norm() / truth[i].norm() for i in compared]).norm()
        for side in (found, own)
    )
    assert far <= allowed * (1 + slack) + least


def moved(arguments: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.to("npu") for tensor in arguments]
