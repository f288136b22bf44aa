"""Collectives of two software devices, against sums and concatenations of what all ranks gave."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tests.distributed.processes import BACKENDS, Processes

RANKS = 2


def given(rank: int, size: int = 4) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float32) + 10 * rank + 1


def everything(rank: int) -> dict[str, torch.Tensor]:
    """What each form of a collective gives to a rank."""
    inputs = [given(r) for r in range(RANKS)]
    total, whole, own = sum(inputs), torch.cat(inputs), slice(2 * rank, 2 * rank + 2)
    exchanged = torch.cat([x[own] for x in inputs])
    return {
        "all_reduce": total,
        "all_reduce average": total / RANKS,
        "all_reduce premultiplied": total / 4,
        "all_reduce asynchronous": total,
        "all_reduce coalesced": total,
        "all_gather": whole,
        "all_gather of several sizes": torch.cat([given(r, r + 1) for r in range(RANKS)]),
        "all_gather into strides": whole,
        "all_gather_into_tensor": whole,
        "all_gather_into_tensor coalesced": whole,
        "all_to_all": exchanged,
        "all_to_all_single": exchanged,
        # rank r gives one row of it to rank 0, and the others to rank 1
        "all_to_all_single with splits": torch.cat([x[:1] if rank == 0 else x[1:] for x in inputs]),
        "all_to_all_single, all to rank 0": whole if rank == 0 else torch.zeros(0),
        "broadcast": inputs[1],
        "gather": whole if rank == 0 else torch.zeros(0),
        "reduce": total if rank == 1 else torch.zeros(0),
        "reduce_scatter": total[own],
        "reduce_scatter of several sizes": total[:1] if rank == 0 else total[1:],
        "reduce_scatter_tensor": total[own],
        "reduce_scatter_tensor average": total[own] / RANKS,
        "reduce_scatter_tensor coalesced": total[own],
        "scatter": inputs[1][own],
        "send and recv": inputs[0],
        "batch_isend_irecv": inputs[1 - rank],
        "batch_isend_irecv with itself": inputs[rank],
        "functional all_reduce": total,
        "functional all_gather": whole,
        "functional reduce_scatter": total[own],
        "functional all_to_all": exchanged,
        "functional coalesced": total,
    }


def collect() -> dict[str, torch.Tensor]:
    rank = dist.get_rank()
    device = torch.device("npu", rank)
    x = given(rank).to(device)
    results: dict[str, torch.Tensor] = {}

    def empty(*sizes: int) -> list[torch.Tensor]:
        return [torch.full((size,), -1.0, device=device) for size in sizes]

    def keep(name: str, *tensors: torch.Tensor) -> None:
        assert all(tensor.device == device for tensor in tensors)
        results[name] = torch.cat([tensor.cpu() for tensor in tensors]) if tensors else torch.zeros(0)

    for name, op in {
        "all_reduce": dist.ReduceOp.SUM,
        "all_reduce average": dist.ReduceOp.AVG,
        "all_reduce premultiplied": dist.ReduceOp.PREMUL_SUM(0.25),
    }.items():
        y = x.clone()
        dist.all_reduce(y, op)
        keep(name, y)
    y = x.clone()
    work = dist.all_reduce(y, async_op=True)
    assert work is not None
    work.wait()
    keep("all_reduce asynchronous", y)
    y = x.clone()
    with dist._coalescing_manager(device=device):
        dist.all_reduce(y[:2])
        dist.all_reduce(y[2:])
    keep("all_reduce coalesced", y)

    outputs = empty(4, 4)
    dist.all_gather(outputs, x)
    keep("all_gather", *outputs)
    outputs = empty(1, 2)
    dist.all_gather(outputs, given(rank, rank + 1).to(device))
    keep("all_gather of several sizes", *outputs)
    outputs = [output.view(2, 2).t() for output in empty(4, 4)]
    dist.all_gather(outputs, x.view(2, 2))
    keep("all_gather into strides", *[output.flatten() for output in outputs])
    (output,) = empty(8)
    dist.all_gather_into_tensor(output, x)
    keep("all_gather_into_tensor", output)
    outputs = empty(4, 4)
    with dist._coalescing_manager():
        dist.all_gather_into_tensor(outputs[0], x[:2])
        dist.all_gather_into_tensor(outputs[1], x[2:])
    keep("all_gather_into_tensor coalesced", *[output[2 * r : 2 * r + 2] for r in range(RANKS) for output in outputs])

    outputs = empty(2, 2)
    dist.all_to_all(outputs, [x[:2], x[2:]])
    keep("all_to_all", *outputs)
    (output,) = empty(4)
    dist.all_to_all_single(output, x)
    keep("all_to_all_single", output)
    (output,) = empty(2 if rank == 0 else 6)
    dist.all_to_all_single(output, x, [1, 1] if rank == 0 else [3, 3], [1, 3])
    keep("all_to_all_single with splits", output)

    output = torch.full((4 if rank == 0 else 0, 2), -1.0, device=device)
    dist.all_to_all_single(output, x.view(2, 2), [2, 2] if rank == 0 else [0, 0], [2, 0])
    keep("all_to_all_single, all to rank 0", output.flatten())

    y = x.clone()
    dist.broadcast(y, 1)
    keep("broadcast", y)
    outputs = empty(4, 4) if rank == 0 else []
    dist.gather(x, outputs or None)
    keep("gather", *outputs)
    y = x.clone()
    dist.reduce(y, 1)
    keep("reduce", *[y][: rank == 1])

    (output,) = empty(2)
    dist.reduce_scatter(output, [x[:2], x[2:]])
    keep("reduce_scatter", output)
    (output,) = empty(1 if rank == 0 else 3)
    dist.reduce_scatter(output, [x[:1], x[1:]])
    keep("reduce_scatter of several sizes", output)
    for name, op in {"": dist.ReduceOp.SUM, " average": dist.ReduceOp.AVG}.items():
        (output,) = empty(2)
        dist.reduce_scatter_tensor(output, x, op=op)
        keep("reduce_scatter_tensor" + name, output)
    outputs = empty(1, 1)
    with dist._coalescing_manager():
        dist.reduce_scatter_tensor(outputs[0], x[::2].contiguous())
        dist.reduce_scatter_tensor(outputs[1], x[1::2].contiguous())
    keep("reduce_scatter_tensor coalesced", *outputs)
    (output,) = empty(2)
    dist.scatter(output, [x[:2], x[2:]] if rank == 1 else None, src=1)
    keep("scatter", output)

    (output,) = [x] if rank == 0 else empty(4)
    dist.send(x, 1) if rank == 0 else dist.recv(output, 0)
    keep("send and recv", output)
    (output,) = empty(4)
    pair = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, output, 1 - rank)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    keep("batch_isend_irecv", output)
    (output,) = empty(4)
    pair = [dist.P2POp(dist.irecv, output, rank), dist.P2POp(dist.isend, x, rank)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    keep("batch_isend_irecv with itself", output)

    world = dist.group.WORLD
    keep("functional all_reduce", functional.all_reduce(x, "sum", world))
    keep("functional all_gather", functional.all_gather_single(x, 0, world))
    keep("functional reduce_scatter", functional.reduce_scatter_single(x, "sum", 0, world))
    keep("functional all_to_all", functional.all_to_all_single(x, None, None, world))
    keep("functional coalesced", *functional.all_reduce_coalesced([x[:2], x[2:]], "sum", world))
    return results


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_form_of_a_collective(two_ranks: Processes, backend: str) -> None:
    for rank, results in enumerate(two_ranks.run(collect, backend=backend)):
        expected = everything(rank)
        assert results.keys() == expected.keys()
        for name, tensor in results.items():
            assert torch.equal(tensor, expected[name]), (name, tensor, expected[name])  # small integers: exact


def talk_about_objects() -> list:
    rank, gathered, box = dist.get_rank(), [None] * RANKS, [dist.get_rank()]
    dist.all_gather_object(gathered, {"rank": rank})
    dist.broadcast_object_list(box, 1)
    collected = [None] * RANKS if rank == 0 else None
    dist.gather_object(str(rank), collected)
    received = [None]
    dist.scatter_object_list(received, ["a", "b"] if rank == 0 else None)
    return [gathered, box, collected, received]


def test_objects(two_ranks: Processes) -> None:
    everyone = [{"rank": 0}, {"rank": 1}]
    assert two_ranks.run(talk_about_objects) == [[everyone, [1], ["0", "1"], ["a"]], [everyone, [1], None, ["b"]]]
