"""Define the operators that move tensors between ranks, as bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, Work
from torch_npu import npu

from softnpu.hccl import limits
from softnpu.hccl.collective_call import CollectiveCall, flat, nbytes, operator, sizes
from softnpu.hccl.combined_works import joined, then


@operator("broadcast_")
def _broadcast(call: CollectiveCall) -> Work:
    tensor = limits.require_one(call.name, call.given["tensors"])
    limits.require_moved(call.name, [tensor])
    call.count("broadcast", [tensor], tensor.nbytes)
    call.agree("broadcast", tensor.dtype, tensor.numel(), f"from {call.given['root_rank']}")
    return call.again(tensors=[call.bytes(tensor)])


@operator("_allgather_base_")
def _all_gather_tensor(call: CollectiveCall) -> Work:
    output, tensor = call.given["output_tensor"], call.given["input_tensor"]
    _require_gathered(call, [output], [tensor])
    return call.again(output_tensor=call.bytes(output), input_tensor=call.bytes(tensor))


@operator("allgather_into_tensor_coalesced_")
def _all_gather_tensors(call: CollectiveCall) -> Work:
    outputs, inputs = call.given["outputs"], call.given["inputs"]
    _require_gathered(call, outputs, inputs)
    return call.again(outputs=[call.bytes(t) for t in outputs], inputs=[call.bytes(t) for t in inputs])


def _require_gathered(call: CollectiveCall, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    for output, tensor in zip(outputs, inputs):
        limits.require_same_type(call.name, tensor, output)
        limits.require_size(call.name, output, tensor, call.ranks)
    limits.require_contiguous(call.name, [*outputs, *inputs])
    limits.require_moved(call.name, inputs)
    call.count("all_gather", [*outputs, *inputs], nbytes(outputs))
    call.agree("all_gather", inputs[0].dtype, sizes(inputs))


@operator("allgather_")
def _all_gather(call: CollectiveCall) -> Work:
    tensor = limits.require_one(call.name, call.given["input_tensors"])
    (parts,) = call.given["output_tensors"]
    limits.require_list(call.name, parts, tensor, call.ranks)
    limits.require_size(call.name, parts[call.rank], tensor, 1)
    limits.require_moved(call.name, [tensor])
    call.count("all_gather", [tensor, *parts], nbytes(parts))
    call.agree("all_gather", tensor.dtype, sizes(parts))
    targets = [call.host(part) for part in parts]
    results = [
        target if target.is_contiguous() else torch.empty(target.shape, dtype=target.dtype) for target in targets
    ]
    source = flat(call.host(tensor).contiguous())
    if len({part.numel() for part in parts}) == 1:
        views = [flat(result).view(torch.uint8) for result in results]
        work = call.again(output_tensors=[views], input_tensors=[source.view(torch.uint8)])
        return then(work, targets, results)
    flat(results[call.rank]).copy_(source)
    works = []
    for rank, result in enumerate(results):
        options = BroadcastOptions()
        options.rootRank = rank
        works.append(call.on_host.broadcast([flat(result).view(torch.uint8)], options))
    return then(joined(works), targets, results)


@operator("scatter_")
def _scatter(call: CollectiveCall) -> Work:
    output = limits.require_one(call.name, call.given["output_tensors"])
    limits.require_moved(call.name, [output])
    parts = call.given["input_tensors"]
    for listed in parts:
        limits.require_list(call.name, listed, output, call.ranks)
        limits.require_contiguous(call.name, listed)
        for part in listed:
            limits.require_size(call.name, part, output, 1)
    call.count("scatter", [output, *(part for listed in parts for part in listed)], output.nbytes * call.ranks)
    call.agree("scatter", output.dtype, output.numel(), f"from {call.given['root_rank']}")
    sources = [[call.bytes(part) for part in listed] for listed in parts]
    return call.again(output_tensors=[call.bytes(output)], input_tensors=sources)


@operator("gather_")
def _gather(call: CollectiveCall) -> Work:
    if not npu.are_compatible_impl_enabled():
        raise RuntimeError(
            "ProcessGroupHCCL does not support gather: torch_npu makes an all_gather of dist.gather, or sends and "
            "receives after torch.npu.set_compatible_impl(True)"
        )
    tensor = limits.require_one(call.name, call.given["input_tensors"])
    limits.require_moved(call.name, [tensor])
    parts = call.given["output_tensors"]
    for listed in parts:
        limits.require_list(call.name, listed, tensor, call.ranks)
        limits.require_contiguous(call.name, listed)
        for part in listed:
            limits.require_size(call.name, part, tensor, 1)
    call.count("gather", [tensor, *(part for listed in parts for part in listed)], tensor.nbytes * call.ranks)
    call.agree("gather", tensor.dtype, tensor.numel(), f"to {call.given['root_rank']}")
    targets = [[call.bytes(part) for part in listed] for listed in parts]
    return call.again(output_tensors=targets, input_tensors=[call.bytes(tensor)])


@operator("alltoall_base_")
def _all_to_all_tensor(call: CollectiveCall) -> Work:
    output, tensor = call.given["output"], call.given["input"]
    received, sent = call.given["output_split_sizes"], call.given["input_split_sizes"]
    limits.require_contiguous(call.name, [output, tensor])
    limits.require_same_type(call.name, tensor, output)
    limits.require_moved(call.name, [tensor])
    if not received and not sent:
        limits.require_size(call.name, output, tensor, 1)
    limits.require_splits(call.name, tensor, sent, call.ranks)
    limits.require_splits(call.name, output, received, call.ranks)
    call.count("all_to_all", [output, tensor], tensor.nbytes)
    call.agree("all_to_all", tensor.dtype)
    return call.again(output=call.rows(output), input=call.rows(tensor))


@operator("alltoall_")
def _all_to_all(call: CollectiveCall) -> Work:
    outputs, inputs = call.given["output_tensors"], call.given["input_tensors"]
    for tensors in (outputs, inputs):
        limits.require_list(call.name, tensors, inputs[0], call.ranks)
        limits.require_contiguous(call.name, tensors)
        limits.require_moved(call.name, tensors, (*limits.MOVED, *limits.MOVED_AS_BYTES))
    call.count("all_to_all", [*outputs, *inputs], nbytes(inputs))
    call.agree("all_to_all", inputs[0].dtype)
    return call.again(
        output_tensors=[call.bytes(tensor) for tensor in outputs],
        input_tensors=[call.bytes(tensor) for tensor in inputs],
    )


@operator("send")
def _send(call: CollectiveCall) -> Work:
    return _one_way(call, "send")


@operator("recv_")
def _receive(call: CollectiveCall) -> Work:
    return _one_way(call, "recv")


def _one_way(call: CollectiveCall, operator: str) -> Work:
    tensor = limits.require_one(call.name, call.given["tensors"])
    limits.require_moved(call.name, [tensor])
    call.count(operator, [tensor], tensor.nbytes)
    if call.given["dst" if operator == "send" else "src"] == call.rank:
        return call.with_itself(operator, call.bytes(tensor), call.given["tag"])
    return call.again(tensors=[call.bytes(tensor)])


@operator("barrier")
def _barrier(call: CollectiveCall) -> Work:
    """Wait for the device on the host, as ``WorkHCCL::synchronizeInternal`` does, then for the other ranks."""
    call.count("barrier", [], 0)
    call.agree("barrier")
    npu.synchronize()
    return call.again(tensor=torch.empty(1), device_ids=[])


@operator("recv_any_source_")
def _receive_from_anyone(call: CollectiveCall) -> Work:
    raise RuntimeError(
        "ProcessGroupHCCL does not support recv from any rank: name the source, dist.recv(tensor, src=...)"
    )


@operator("allgather_coalesced_")
def _all_gather_coalesced(call: CollectiveCall) -> Work:
    raise RuntimeError("Backend hccl does not support allgather_coalesced: call all_gather for each tensor")
