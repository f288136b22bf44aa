"""A batch norm in parts, as devices that share a batch compute it, against torch's own over the whole batch."""

import pytest
import torch
import torch_npu
from torch import nn

EPS, MOMENTUM = 1e-5, 0.1


@pytest.mark.parametrize("joins", ["sums", "means"])
@pytest.mark.parametrize("affine", [False, True])
def test_the_parts_of_two_devices_are_the_norm_of_all(affine, joins) -> None:
    parts, dy = [torch.randn(n, 3, 4, 2) + 2 for n in (2, 5)], torch.randn(7, 3, 4, 2)
    whole = torch.cat(parts).double().requires_grad_()
    norm = nn.BatchNorm2d(3, EPS, MOMENTUM, affine=affine).double()
    if affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    expected = norm(whole)
    expected.backward(dy.double())

    weight, bias = ((p.detach().float().npu() if affine else None) for p in (norm.weight, norm.bias))
    running_mean, running_var = torch.zeros(3).npu(), torch.ones(3).npu()
    x, dys = [t.npu() for t in parts], [t.npu() for t in dy.split([2, 5])]
    counts = torch.tensor([t.numel() / 3 for t in parts]).npu()
    if joins == "sums":
        local, join = [torch_npu.batch_norm_reduce(t, EPS) for t in x], torch_npu.batch_norm_gather_stats_update
    else:
        local, join = [torch.batch_norm_stats(t, EPS) for t in x], torch.batch_norm_gather_stats_with_counts
    first, second = (torch.stack(column) for column in zip(*local))
    mean, invstd = join(x[0], first, second, running_mean, running_var, MOMENTUM, EPS, counts)
    out = torch.cat([torch.batch_norm_elemt(t, weight, bias, mean, invstd, EPS) for t in x])
    close(out, expected)
    close(running_mean, norm.running_mean)
    close(running_var, norm.running_var)

    reduced = [
        torch.batch_norm_backward_reduce(g, t, mean, invstd, weight, True, affine, affine) for g, t in zip(dys, x)
    ]
    sum_dy, sum_dy_xmu = (sum(column) for column in list(zip(*reduced))[:2])
    dx = [
        torch.batch_norm_backward_elemt(g, t, mean, invstd, weight, sum_dy, sum_dy_xmu, counts.int())
        for g, t in zip(dys, x)
    ]
    close(torch.cat(dx), whole.grad)
    if affine:
        close(sum(part[2] for part in reduced), norm.weight.grad)
        close(sum(part[3] for part in reduced), norm.bias.grad)


@pytest.mark.parametrize("join", [torch_npu.batch_norm_gather_stats_update, torch.batch_norm_gather_stats_with_counts])
def test_joined_statistics_have_the_dtype_of_those_that_they_join(join) -> None:
    x, sums = torch.ones(2, 3, 4).npu(), torch.full((2, 3), 8.0).half().npu()
    results = join(x, sums, sums, None, None, MOMENTUM, EPS, torch.tensor([8.0, 8.0]).npu())
    assert [t.dtype for t in results] == [torch.float16, torch.float16]


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Sums of 56 numbers in float32, and their squares: a few hundred roundings at most."""
    torch.testing.assert_close(found.cpu().double(), expected.detach(), rtol=2e-5, atol=2e-5)
