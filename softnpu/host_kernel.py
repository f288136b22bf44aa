"""Make the device's kernel of an operator: it runs on the host, over the bytes of NPU tensors, and counts the call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey, _AutoDispatchBelowAutograd

from softnpu import graph_capture
from softnpu.captured_call import Operator, capture
from softnpu.counting import DEVICE_TO_HOST_COPIES, count, count_wait
from softnpu.dynamo_exclusion import untraced
from softnpu.float32_arithmetic import IN_FLOAT32, in_float32
from softnpu.host_call import CROSS_DEVICE, HostCall, mixed_devices
from softnpu.int64_indices import INDEX, with_int64_indices
from softnpu.list_arithmetic import LISTS, run_on_lists
from softnpu.number_arithmetic import ARITHMETIC, with_numbers
from softnpu.out_of_reach import UNWRITTEN
from softnpu.randomness import default_generator, host_generator

# operators that take index, length or seed tensors of the CPU beside tensors of the device
HOST_ARGUMENTS = {
    "_index_put_impl_", "_pack_padded_sequence", "_unsafe_index", "_unsafe_index_put", "ctc_loss", "_ctc_loss",
    "index", "index_put", "index_put_", "npu_fusion_attention_v3", "npu_fusion_attention_grad_v3",
} | CROSS_DEVICE  # fmt: skip

# arguments that these read on the host, as tensors of the CPU, and what op-plugin says of others: ToIntArrayRef and
# PackPaddedSequenceKernelNpuOpApi.cpp
LENGTHS = dict.fromkeys(("actual_seq_qlen", "actual_seq_kvlen"), "tensor must be on CPU") | {
    "lengths": "'lengths' argument should be a CPU tensor, but got a tensor of the device"
}
# op-plugin reads them on the host: ForeachAddcdivTensorKernelNpuOpApi.cpp
SCALARS = "scalars"

# torch_npu gives their results the strides of their arguments, and that of all others none: they are contiguous
STRIDED = {"clone", "_fft_c2c", "_fft_c2r", "_fft_r2c"}

# writes to an argument that its schema does not mark
UNMARKED = ("_copy_from_and_resize", "dst")

# the shape of the result, or what is written to, depends on data only with a mask among the indices
MASKED = {"_index_put_impl_", "_unsafe_index", "_unsafe_index_put", "index", "index_put", "index_put_"}


def on_host(op: torch._ops.OpOverload, run_host: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Make a kernel of ``op`` that runs ``run_host``, by default ``op`` itself, on CPU tensors over the same bytes."""
    is_formula = run_host is not None
    run_host = run_host or op
    name = op._schema.name.partition("::")[2]
    contiguous = name not in STRIDED
    run_host = in_float32(op, run_host) if name in IN_FLOAT32 else run_host
    run_host = run_on_lists(op, run_host) if name in LISTS else run_host
    run_host = with_numbers(op, run_host) if name in ARITHMETIC else run_host
    run_host = with_int64_indices(op, run_host) if name in INDEX else run_host
    arguments = list(enumerate(op._schema.arguments))
    written = [(i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]
    written += [(i, a.name) for i, a in arguments if (name, a.name) == UNMARKED]
    outputs = [a.name for _, a in arguments if a.is_out]
    random = torch.Tag.nondeterministic_seeded in op.tags and op.namespace != "npu"  # those draw themselves
    lengths = [(i, a.name) for i, a in arguments if a.name in LENGTHS and name in HOST_ARGUMENTS]
    scalars = next((i for i, a in arguments if a.name == SCALARS and str(a.type) == "Tensor"), None)
    generator_position = next((i for i, a in arguments if a.name == "generator"), None)
    refuses_host_tensors = name not in HOST_ARGUMENTS  # the device reads no memory of the host, but a scalar's
    waits_for_shape = _waits_for_shape(op, name)
    reads_data = torch.Tag.data_dependent_output in op.tags

    several = name.startswith("_foreach_")
    takes_numbers = torch._C._should_allow_numbers_as_tensors(name.removesuffix("_"))
    tensors = set() if takes_numbers else {i for i, a in arguments if str(a.type) == "Tensor"}

    def prepare(call: HostCall, args: tuple, kwargs: dict) -> tuple[list, dict]:
        host_args = [call.enter(value) for value in args]
        host_kwargs = {key: call.enter(value) for key, value in kwargs.items()}
        refused = call.of_the_host if refuses_host_tensors and call.originals else None
        if refused is not None and (scalars is None or refused is not args[scalars]):
            raise mixed_devices(name, call.device, refused.device)
        for i in tensors:
            if i < len(host_args) and isinstance(host_args[i], (int, float, complex)):
                host_args[i] = torch.tensor(host_args[i])  # torch has wrapped a number, and hands it to Python again
        return host_args, host_kwargs

    def run(call: HostCall, args: list, kwargs: dict) -> Any:
        once = functools.partial(_run_random, call, run_host, generator_position) if random else run_host
        return _run_resizing(call, once, args, kwargs, outputs) if outputs else once(*args, **kwargs)

    operator = Operator(name, run, is_formula, contiguous, written, outputs, prepare)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if several and len(_devices(args)) > 1:  # op-plugin leaves these to torch, which takes one after the other
            with _AutoDispatchBelowAutograd():
                return op._op_dk(DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        for position, key in lengths:
            value = args[position] if position < len(args) else kwargs.get(key)
            if value is not None and value.device.type != "cpu":
                raise RuntimeError(f"{name}: {LENGTHS[key]}, {key} is on {value.device}")
        if graph_capture.captured and (stream := graph_capture.current()) is not None:
            if reads_data or waits_for_shape(args, kwargs) or (name == "copy_" and _copy_waits(*args)):
                graph_capture.refuse_wait(name)
            return capture(stream, operator, args, kwargs)
        count(name)
        if reads_data or waits_for_shape(args, kwargs):
            count_wait(copies=reads_data)
        elif name == "copy_":
            _count_copy(*args)
        with _AutoDispatchBelowAutograd():
            call = HostCall(name, contiguous, borrows=True)
            host_args, host_kwargs = prepare(call, args, kwargs)
            result = run(call, host_args, host_kwargs)
            for position, key in written:
                value = host_args[position] if position < len(host_args) else host_kwargs.get(key)
                for tensor in value if isinstance(value, list) else [value]:
                    call.write_back(tensor)
            return call.leave(result)

    return untraced(kernel)


def refusal(operator: str, why: str = UNWRITTEN) -> Callable[..., Any]:
    """Make a kernel that raises, for an operator that nothing on the host computes, and says why."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            f"{operator}: the software device has no formula for this operator (softnpu/formulas holds those it has): "
            f"{why}"
        )

    return refuse


def _run_resizing(call: HostCall, run: Callable, args: list, kwargs: dict, outputs: list[str]) -> Any:
    """Run with the bytes of the outputs; if one of them has to grow, with memory that can."""
    for key in outputs:
        # some kernels of the CPU (gelu, avg_pool3d) write to a strided output as if it were contiguous
        if isinstance(kwargs[key], torch.Tensor) and not kwargs[key].is_contiguous():
            kwargs[key] = call.stand_in(kwargs[key], strided=False)
    try:
        return run(*args, **kwargs)
    except RuntimeError as error:
        if not outputs or "not resizable" not in str(error):
            raise
    for key in outputs:
        if isinstance(kwargs[key], torch.Tensor):
            kwargs[key] = call.stand_in(kwargs[key], strided=True)
    return run(*args, **kwargs)


def _run_random(call: HostCall, run: Callable, position: int | None, /, *args: Any, **kwargs: Any) -> Any:
    """Run with the numbers that the NPU generator stands for."""
    arguments = list(args)
    given = arguments[position] if position is not None and position < len(arguments) else kwargs.get("generator")
    if given is not None and given.device.type != "npu":
        raise RuntimeError(f"{call.name}: expected an npu generator, found one of {given.device}")
    generator = host_generator(given, call.device)
    if position is None:
        with default_generator(generator):
            return run(*arguments, **kwargs)
    if position < len(arguments):
        arguments[position] = generator
    else:
        kwargs = kwargs | {"generator": generator}
    return run(*arguments, **kwargs)


def _devices(args: tuple) -> set[torch.device]:
    """Return the devices of the tensors in lists."""
    return {
        tensor.device
        for value in args
        if isinstance(value, (list, tuple))
        for tensor in value
        if isinstance(tensor, torch.Tensor)
    }


def _copy_waits(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> bool:
    """Tell whether the host waits for a copy: one to or from itself, unless it is non-blocking and its side pinned."""
    on_host = next((t for t in (target, source) if t.device.type == "cpu"), None)
    return on_host is not None and not (non_blocking and on_host.is_pinned())


def _count_copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> None:
    """Count a wait for a copy to the host, unless it is non-blocking and the target, pinned, can be written later."""
    if target.device.type == "cpu" and source.device.type == "npu":
        if non_blocking and target.is_pinned():
            count(DEVICE_TO_HOST_COPIES)
        else:
            count_wait(copies=True)


def _waits_for_shape(op: torch._ops.OpOverload, name: str) -> Callable[[tuple, dict], bool]:
    """Return a predicate: does the shape of the result depend on these arguments' data, so that the host waits?"""
    if name in MASKED:
        return lambda args, kwargs: any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
    if name == "repeat_interleave" and op._overloadname != "self_int":
        return lambda args, kwargs: kwargs.get("output_size") is None
    dynamic = torch.Tag.dynamic_output_shape in op.tags
    return lambda args, kwargs: dynamic
