"""Process groups of software devices: what is counted in them, and what they leave alone."""

import gc
import time

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import softnpu
from tests.distributed.processes import BACKENDS, Processes

RANKS = 2


def count() -> tuple[dict, dict, dict]:
    """Of collectives, of work with others, and of a barrier."""
    rank = dist.get_rank()
    device = torch.device("npu", rank)
    x, whole, part = torch.ones(6, device=device), torch.empty(12, device=device), torch.empty(3, device=device)
    leaf = torch.ones(6, device=device, requires_grad=True)
    pair = dist.new_group([0, 1])
    softnpu.reset_counters()
    dist.all_reduce(x)
    dist.all_reduce(x.half(), group=pair)
    dist.all_gather_into_tensor(whole, x)
    dist.all_gather([torch.empty_like(x) for _ in range(RANKS)], x)
    dist.reduce_scatter_tensor(part, x)
    dist.all_to_all_single(
        torch.empty(2 if rank == 0 else 10, device=device), x, *([[1, 1], [1, 5]] if rank == 0 else [[5, 5], [1, 5]])
    )
    dist.broadcast(x, 0)
    dist.scatter(part, [x[:3].contiguous(), x[3:].contiguous()] if rank == 0 else None)
    dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
    dist.all_reduce(x, async_op=True).wait()
    # backward runs in a thread of its own
    functional.all_gather_single_autograd(leaf, 0, dist.group.WORLD).sum().backward()
    counted, waits = softnpu.collectives(), softnpu.counters()
    softnpu.reset_counters()
    assert softnpu.collectives() == {}
    dist.barrier()
    return (
        {(key.operator, key.group == pair.group_name, key.ranks): value for key, value in counted.items()},
        {key: waits[key] for key in ("stream_syncs", "device_to_host_copies")},
        {"barrier": [*softnpu.collectives().values()], "syncs": softnpu.counters()["stream_syncs"]},
    )


def test_calls_and_bytes_are_counted_and_only_a_barrier_waits(two_ranks: Processes) -> None:
    for rank, (counted, waits, barrier) in enumerate(two_ranks.run(count)):
        four = 4  # bytes of float32
        assert counted == {
            ("all_reduce", False, 2): (2, 2 * 6 * four),
            ("all_reduce", True, 2): (1, 6 * 2),
            ("all_gather", False, 2): (3, 3 * 12 * four),
            ("reduce_scatter", False, 2): (2, (6 + 12) * four),  # the second is the gradient of the gather
            ("all_to_all", False, 2): (1, 6 * four),
            ("broadcast", False, 2): (1, 6 * four),
            ("scatter", False, 2): (1, 6 * four),
            ("send" if rank == 0 else "recv", False, 2): (1, 6 * four),
        }
        assert waits == {"stream_syncs": 0, "device_to_host_copies": 0}
        assert barrier == {"barrier": [(1, 0)], "syncs": 1}  # WorkHCCL::synchronizeInternal


def outlive() -> list[float]:
    """Rank 0 sends a tensor that is gone, and whose memory would be taken over, once rank 1 is there to receive it."""
    tensor = torch.full((50_000,), float(dist.get_rank()), device="npu")
    if dist.get_rank() == 1:
        time.sleep(0.5)
        dist.broadcast(tensor, 0)
        return tensor.unique().tolist()
    work = dist.broadcast(tensor, 0, async_op=True)
    del tensor
    gc.collect()
    later = [torch.full((50_000,), -1.0, device="npu") for _ in range(8)]
    work.wait()
    return later[0].unique().tolist()


def test_an_asynchronous_collective_outlives_its_tensor(two_ranks: Processes) -> None:
    assert two_ranks.run(outlive) == [[-1.0], [0.0]]


def addresses() -> set[str]:
    """Of all sockets of this process, both ends; those that listen to nobody in particular have 0.0.0.0."""
    dist.all_reduce(torch.ones(2, device="npu"))
    sockets = psutil.Process().net_connections()
    return {end.ip for each in sockets for end in (each.laddr, each.raddr) if end}


@pytest.mark.parametrize("backend", BACKENDS)
def test_sockets_are_on_loopback(two_ranks: Processes, backend: str) -> None:
    for found in two_ranks.run(addresses, backend=backend):
        assert "127.0.0.1" in found
        assert found <= {"127.0.0.1", "0.0.0.0"}, found  # gloo's listening sockets have no far end


def reduce_in_a_fake_group() -> list[float]:
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  it registers the backend

    group = dist.new_group(backend="cpu:fake,npu:fake")
    x = torch.full((2,), 5.0, device="npu")
    dist.all_reduce(x, group=group)
    dist.destroy_process_group(group)
    return x.tolist()


@pytest.mark.distributed
def test_other_backends_for_the_device_stay_what_they_are(two_ranks: Processes) -> None:
    assert two_ranks.run(reduce_in_a_fake_group) == [[5.0, 5.0]] * 2  # a fake all_reduce leaves what it is given
