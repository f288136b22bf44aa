"""Collectives of two software devices, against sums and concatenations of what all ranks gave."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tests.distributed.processes import BACKENDS, Processes

RANKS = 2


def given(rank: int, size: int = 4) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float32) + 10 * rank + 1


def changed(x: torch.Tensor, call: Callable[[torch.Tensor], object]) -> torch.Tensor:
    """Return what a collective makes of a copy."""
    y = x.clone()
    call(y)
    return y


def filled(x: torch.Tensor, sizes: tuple[int, ...], call: Callable[[list[torch.Tensor]], object]) -> torch.Tensor:
    """Return what a collective writes into tensors of some sizes, which lie side by side."""
    whole = torch.zeros(sum(sizes), dtype=x.dtype, device=x.device)
    call(list(whole.split(sizes)) if sizes else [])
    return whole


def in_one(call: Callable[[int], object], **options: torch.device) -> None:
    """Do both halves of a collective at once."""
    with dist._coalescing_manager(**options):
        call(0)
        call(1)


def both_ways(output: torch.Tensor, x: torch.Tensor, peer: int, sends_first: bool) -> None:
    """Send to a rank and receive from it, in one batch."""
    pair = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, output, peer)]
    for work in dist.batch_isend_irecv(pair if sends_first else pair[::-1]):
        work.wait()


def collect() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """What each form of a collective gives to a rank, and what it has to give."""
    rank, world = dist.get_rank(), dist.group.WORLD
    device = torch.device("npu", rank)
    x = given(rank).to(device)
    halves, some = [x[:2], x[2:]], given(rank, rank + 1).to(device)
    is_first = rank == 0
    inputs = [given(r) for r in range(RANKS)]
    total, whole, own, nothing = sum(inputs), torch.cat(inputs), slice(2 * rank, 2 * rank + 2), torch.zeros(0)
    exchanged = torch.cat([x[own] for x in inputs])
    results = {
        "all_reduce": (changed(x, dist.all_reduce), total),
        "all_reduce average": (changed(x, lambda y: dist.all_reduce(y, dist.ReduceOp.AVG)), total / RANKS),
        "all_reduce premultiplied": (
            changed(x, lambda y: dist.all_reduce(y, dist.ReduceOp.PREMUL_SUM(0.25))),
            total / 4,
        ),
        "all_reduce asynchronous": (changed(x, lambda y: dist.all_reduce(y, async_op=True).wait()), total),
        "all_reduce coalesced": (
            changed(x, lambda y: in_one(lambda half: dist.all_reduce(y[2 * half : 2 * half + 2]), device=device)),
            total,
        ),
        "all_gather": (filled(x, (4, 4), lambda o: dist.all_gather(o, x)), whole),
        "all_gather of several sizes": (
            filled(x, (1, 2), lambda o: dist.all_gather(o, some)),
            torch.cat([given(r, r + 1) for r in range(RANKS)]),
        ),
        "all_gather into strides": (
            filled(x, (4, 4), lambda o: dist.all_gather([y.view(2, 2).t() for y in o], x.view(2, 2))),
            torch.cat([x.view(2, 2).t().flatten() for x in inputs]),
        ),
        "all_gather_into_tensor": (filled(x, (8,), lambda o: dist.all_gather_into_tensor(o[0], x)), whole),
        "all_gather_into_tensor coalesced": (
            filled(x, (4, 4), lambda o: in_one(lambda half: dist.all_gather_into_tensor(o[half], halves[half]))),
            torch.cat([x[half : half + 2] for half in (0, 2) for x in inputs]),
        ),
        "all_to_all": (filled(x, (2, 2), lambda o: dist.all_to_all(o, halves)), exchanged),
        "all_to_all_single": (filled(x, (4,), lambda o: dist.all_to_all_single(o[0], x)), exchanged),
        "all_to_all_single with splits": (
            filled(x, (2 + 4 * rank,), lambda o: dist.all_to_all_single(o[0], x, [1 + 2 * rank] * 2, [1, 3])),
            torch.cat([x[:1] if rank == 0 else x[1:] for x in inputs]),
        ),
        "all_to_all_single, all to rank 0": (
            filled(x, (8 - 8 * rank,), lambda o: dist.all_to_all_single(o[0], x, [4 - 4 * rank] * 2, [4, 0])),
            whole if rank == 0 else nothing,
        ),
        "broadcast": (changed(x, lambda y: dist.broadcast(y, 1)), inputs[1]),
        "gather": (
            filled(x, (4, 4) if is_first else (), lambda o: dist.gather(x, o or None)),
            whole if rank == 0 else nothing,
        ),
        "reduce": (changed(x, lambda y: dist.reduce(y, 1))[: 4 * rank], total if rank == 1 else nothing),
        "reduce_scatter": (filled(x, (2,), lambda o: dist.reduce_scatter(o[0], halves)), total[own]),
        "reduce_scatter of several sizes": (
            filled(x, (1 + 2 * rank,), lambda o: dist.reduce_scatter(o[0], [x[:1], x[1:]])),
            total[:1] if rank == 0 else total[1:],
        ),
        "reduce_scatter_tensor": (filled(x, (2,), lambda o: dist.reduce_scatter_tensor(o[0], x)), total[own]),
        "reduce_scatter_tensor average": (
            filled(x, (2,), lambda o: dist.reduce_scatter_tensor(o[0], x, op=dist.ReduceOp.AVG)),
            total[own] / RANKS,
        ),
        "reduce_scatter_tensor premultiplied": (
            filled(x, (2,), lambda o: dist.reduce_scatter_tensor(o[0], x.clone(), op=dist.ReduceOp.PREMUL_SUM(0.5))),
            total[own] / 2,
        ),
        "the input that ProcessGroupHCCL::_reduce_scatter_base scales in place": (
            changed(x, lambda y: dist.reduce_scatter_tensor(y.new_empty(2), y, op=dist.ReduceOp.PREMUL_SUM(0.5))),
            inputs[rank] / 2,
        ),
        "reduce_scatter_tensor coalesced": (
            filled(
                x, (1, 1), lambda o: in_one(lambda half: dist.reduce_scatter_tensor(o[half], x[half::2].contiguous()))
            ),
            total[own],
        ),
        "scatter": (filled(x, (2,), lambda o: dist.scatter(o[0], None if is_first else halves, src=1)), inputs[1][own]),
        "send and recv": (changed(x, lambda y: dist.send(y, 1) if is_first else dist.recv(y, 0)), inputs[0]),
        "batch_isend_irecv": (
            filled(x, (4,), lambda o: both_ways(o[0], x, 1 - rank, sends_first=True)),
            inputs[1 - rank],
        ),
        "batch_isend_irecv with itself": (
            filled(x, (4,), lambda o: both_ways(o[0], x, rank, sends_first=False)),
            inputs[rank],
        ),
        "functional all_reduce": (functional.all_reduce(x, "sum", world), total),
        "functional all_gather": (functional.all_gather_single(x, 0, world), whole),
        "functional reduce_scatter": (functional.reduce_scatter_single(x, "sum", 0, world), total[own]),
        "functional all_to_all": (functional.all_to_all_single(x, None, None, world), exchanged),
        "functional coalesced": (torch.cat(functional.all_reduce_coalesced(halves, "sum", world)), total),
    }
    assert all(result.device == device for result, _ in results.values())
    return {name: (result.cpu(), expected) for name, (result, expected) in results.items()}


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_form_of_a_collective(two_ranks: Processes, backend: str) -> None:
    for results in two_ranks.run(collect, backend=backend):
        for name, (tensor, expected) in results.items():
            assert torch.equal(tensor, expected), (name, tensor, expected)  # small numbers: exact
