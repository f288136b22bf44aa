"""Collectives of two software devices, against sums and concatenations of what all ranks gave."""

from __future__ import annotations

import gc
import os
import socket
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import softnpu
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


def groups() -> dict:
    device = torch.device("npu", dist.get_rank())
    backend = dist.distributed_c10d._get_default_group()._get_backend(device)
    alone = [dist.new_group([rank]) for rank in range(RANKS)][dist.get_rank()]
    x = torch.full((2,), 3.0, device=device)
    dist.all_reduce(x, group=alone)
    mesh = dist.init_device_mesh("npu", (1, RANKS), mesh_dim_names=("replicate", "shard"))
    y = torch.ones(2, device=device)
    dist.all_reduce(y, group=mesh.get_group("shard"))
    dist.all_reduce(y, group=mesh.get_group("replicate"))
    with pytest.raises(RuntimeError) as split:
        dist.split_group(split_ranks=[[0], [1]])
    with pytest.raises(ValueError, match="only implemented for GLOO"):
        dist.monitored_barrier()
    answers = {
        "backend": dist.get_backend(),
        "name": backend.name(),
        "of the group": dist.get_backend(alone),
        "alone": x.tolist(),
        "mesh": y.tolist(),
        "split": str(split.value),
        "cpu": None,
    }
    try:
        z = torch.ones(1)
        dist.all_reduce(z)
        answers["cpu"] = z.item()
    except RuntimeError as error:
        answers["cpu"] = str(error)
    return answers


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_are_named_and_made_as_with_torch_npu(two_ranks: Processes, backend: str) -> None:
    for answers in two_ranks.run(groups, backend=backend):
        assert answers.pop("cpu") == (2.0 if "gloo" in backend else "No backend type associated with device type cpu")
        # torch_npu 2.13 does not override Backend::supportsSplitting, and torch asks for a bound device first
        assert "not safe to split" in answers.pop("split")
        assert answers == {
            "backend": "hccl" if backend == "hccl" else backend,
            "name": "hccl",
            "of the group": "hccl" if backend == "hccl" else backend,
            "alone": [3.0, 3.0],
            "mesh": [2.0, 2.0],
        }


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
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    # backward runs in a thread of its own
    functional.all_gather_single_autograd(leaf, 0, dist.group.WORLD).sum().backward()
    counted, waits = softnpu.collectives(), softnpu.counters()
    softnpu.reset_counters()
    assert softnpu.collectives() == {}
    dist.barrier()
    return (
        {(key.operator, key.group == pair.group_name, key.ranks): tuple(value) for key, value in counted.items()},
        {key: waits[key] for key in ("stream_syncs", "device_to_host_copies")},
        {
            "barrier": [tuple(value) for value in softnpu.collectives().values()],
            "syncs": softnpu.counters()["stream_syncs"],
        },
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
    assert work is not None
    work.wait()
    return later[0].unique().tolist()


def test_an_asynchronous_collective_outlives_its_tensor(two_ranks: Processes) -> None:
    assert two_ranks.run(outlive) == [[-1.0], [0.0]]


def addresses() -> set[str]:
    """Of all sockets of this process, both ends; those that listen to nobody in particular have 0.0.0.0."""
    x = torch.ones(2, device="npu")
    dist.all_reduce(x)
    own = {os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    found = set()
    for table, family in {"tcp": socket.AF_INET, "tcp6": socket.AF_INET6, "udp": socket.AF_INET}.items():
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in own:
                for end in fields[1:3]:
                    words = bytes.fromhex(end.partition(":")[0])
                    packed = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))  # each in host order
                    found.add(socket.inet_ntop(family, packed))
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_sockets_are_on_loopback(two_ranks: Processes, backend: str) -> None:
    for found in two_ranks.run(addresses, backend=backend):
        assert "127.0.0.1" in found
        assert found <= {"127.0.0.1", "0.0.0.0"}, found  # gloo's listening sockets have no far end


def compile_collectives() -> tuple[list[float], list[float]]:
    group = dist.group.WORLD

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compute(x: torch.Tensor) -> torch.Tensor:
        total = functional.all_reduce(x * 2, "sum", group)
        return functional.all_gather_single_autograd(total[:1] * x[:1], 0, group)

    x = torch.full((2,), dist.get_rank() + 1.0, device="npu", requires_grad=True)
    result = compute(x.detach())
    functional.all_gather_single_autograd(x, 0, group).sum().backward()
    return result.tolist(), x.grad.tolist()


@pytest.mark.distributed
def test_functional_collectives_compile(two_ranks: Processes) -> None:
    assert two_ranks.run(compile_collectives) == [([6.0, 12.0], [2.0, 2.0])] * 2


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
