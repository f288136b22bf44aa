"""Define the operators that reduce, computed as HCCL does where gloo has another way or none."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup
from torch.distributed import (
    AllreduceCoalescedOptions,
    AllreduceOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    Work,
)

from softnpu.hccl import limits
from softnpu.hccl.collective_call import CollectiveCall, flat, nbytes, operator, sizes
from softnpu.hccl.combined_works import joined, then

_current = threading.local()


def remember_factors() -> None:
    """Note the factor of ``ReduceOp.PREMUL_SUM`` on its way to the operator, where it cannot be read any more.

    Such a ``ReduceOp`` is only made in Python, and reaches the operators only through these methods.
    """
    for name in dir(ProcessGroup):
        if "reduce" in name:
            setattr(ProcessGroup, name, _noting_factor(getattr(ProcessGroup, name)))


def _noting_factor(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def noting(*args: Any, **kwargs: Any) -> Any:
        for arg in (*args[1:], *kwargs.values()):
            reduction = getattr(arg, "reduceOp", arg)
            if isinstance(reduction, ReduceOp) and reduction == ReduceOp.PREMUL_SUM:
                _current.factor = reduction.factor  # type: ignore[attr-defined]
        return method(*args, **kwargs)

    return noting


@operator("allreduce_")
def _all_reduce(call: CollectiveCall) -> Work:
    tensor = limits.require_one(call.name, call.given["tensors"])
    limits.require_reduced(call.name, [tensor], _asked(call))
    call.count("all_reduce", [tensor], tensor.nbytes)
    call.agree("all_reduce", _asked(call), tensor.dtype, tensor.numel())
    return _reduce_in_place(call, [tensor], AllreduceOptions)


@operator("allreduce_coalesced_")
def _all_reduce_coalesced(call: CollectiveCall) -> Work:
    tensors = call.given["tensors"]
    limits.require_list(call.name, tensors, tensors[0], len(tensors))
    limits.require_contiguous(call.name, tensors)
    limits.require_reduced(call.name, tensors, _asked(call))
    call.count("all_reduce", tensors, nbytes(tensors))
    call.agree("all_reduce", _asked(call), tensors[0].dtype, sizes(tensors))
    return _reduce_in_place(call, tensors, AllreduceCoalescedOptions)


@operator("reduce_")
def _reduce(call: CollectiveCall) -> Work:
    tensor = limits.require_one(call.name, call.given["tensors"])
    limits.require_reduced(call.name, [tensor], _asked(call))
    call.count("reduce", [tensor], tensor.nbytes)
    call.agree("reduce", _asked(call), tensor.dtype, tensor.numel(), f"to {call.given['root_rank']}")
    return _reduce_in_place(call, [tensor], ReduceOptions)


def _reduce_in_place(call: CollectiveCall, tensors: Sequence[Tensor], kind: Callable[[], Any]) -> Work:
    targets = [flat(call.host(tensor)) for tensor in tensors]
    options = _options(call, kind, _scaled(_asked(call), targets))
    values = [_computed(target) for target in targets]
    if kind is ReduceOptions:
        options.rootRank, options.rootTensor = call.given["root_rank"], call.given["root_tensor"]
        if call.rank != options.rootRank:
            return call.on_host.reduce([value.clone() for value in values], options)
        return then(call.on_host.reduce(values, options), targets, values)
    coalesced = kind is AllreduceCoalescedOptions
    run = call.on_host.allreduce_coalesced if coalesced else call.on_host.allreduce
    return then(run(values, options), targets, values)


@operator("_reduce_scatter_base_")
def _reduce_scatter_tensor(call: CollectiveCall) -> Work:
    output, tensor = call.given["output_tensor"], call.given["input_tensor"]
    return _reduce_scatter_tensors(call, [output], [tensor])


@operator("reduce_scatter_tensor_coalesced_")
def _reduce_scatter_coalesced(call: CollectiveCall) -> Work:
    return _reduce_scatter_tensors(call, call.given["outputs"], call.given["inputs"])


def _reduce_scatter_tensors(call: CollectiveCall, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
    for output, tensor in zip(outputs, inputs):
        limits.require_contiguous(call.name, [tensor, output])
        limits.require_same_type(call.name, tensor, output)
        limits.require_size(call.name, tensor, output, call.ranks)
    limits.require_reduced(call.name, inputs, _asked(call))
    call.count("reduce_scatter", [*outputs, *inputs], nbytes(inputs))
    call.agree("reduce_scatter", _asked(call), inputs[0].dtype, sizes(outputs))
    sources = [flat(call.host(tensor)) for tensor in inputs]
    reduction = _scaled(_asked(call), sources)
    works = [_scatter_reduced(call, call.host(output), source, reduction) for output, source in zip(outputs, sources)]
    return works[0] if len(works) == 1 else joined(works)


def _scatter_reduced(call: CollectiveCall, output: Tensor, source: Tensor, reduction: str) -> Work:
    target = flat(output)
    result = _computed(target)
    options = _options(call, ReduceScatterOptions, reduction)
    return then(call.on_host._reduce_scatter_base(result, _computed(source), options), [target], [result])


@operator("reduce_scatter_")
def _reduce_scatter(call: CollectiveCall) -> Work:
    output = limits.require_one(call.name, call.given["output_tensors"])
    (parts,) = call.given["input_tensors"]
    limits.require_list(call.name, parts, output, call.ranks)
    limits.require_size(call.name, parts[call.rank], output, 1)
    limits.require_reduced(call.name, [output], _asked(call))
    call.count("reduce_scatter", [output, *parts], nbytes(parts))
    call.agree("reduce_scatter", _asked(call), output.dtype, sizes(parts))
    sources = [call.host(part).contiguous().flatten() for part in parts]
    if len({source.numel() for source in sources}) == 1:
        whole = torch.cat(sources)
        return _scatter_reduced(call, call.host(output), whole, _scaled(_asked(call), [whole]))
    values = [_computed(source.clone()) for source in sources]
    reduction = _scaled(_asked(call), values)
    works = []
    for rank, value in enumerate(values):
        options = _options(call, ReduceOptions, reduction)
        options.rootRank = rank
        works.append(call.on_host.reduce([value], options))
    return then(joined(works), [call.host(output)], [values[call.rank]])


def _asked(call: CollectiveCall) -> str:
    return ReduceOp.RedOpType(call.given["reduce_op"].op()).name


def _options(call: CollectiveCall, kind: Callable[[], Any], reduction: str) -> Any:
    """Make gloo's options out of a ``ReduceOp`` that an operator is given: Python can read one, and cannot make one."""
    options = kind()
    options.reduceOp = getattr(ReduceOp, reduction)
    options.asyncOp = call.given["async_op"]
    options.timeout = timedelta(milliseconds=call.given["timeout"])
    return options


def _scaled(reduction: str, inputs: Iterable[Tensor]) -> str:
    """Scale the inputs of a ``PREMUL_SUM`` in place, as torch_npu does, and return the reduction that is left to do."""
    if reduction != "PREMUL_SUM":
        return reduction
    for tensor in inputs:
        tensor.mul_(_current.factor)
    return "SUM"


def _computed(host: Tensor) -> Tensor:
    """Return what gloo reduces: int32 for int16, which it has not, otherwise the tensor itself."""
    return host.int() if host.dtype == torch.int16 else host
