"""What HCCL refuses is refused, with what was given and what is allowed; what it takes comes out right.

The tables are those of HCCL's reference for Atlas A2 (HcclAllReduce, HcclReduceScatter, HcclAllGather) and what
ProcessGroupHCCL.cpp of torch_npu does around them.
"""

import functools
import itertools
import operator

import pytest
import torch
import torch.distributed as dist

from tests.distributed.processes import DEVICES, Processes
from tests.distributed.test_collectives import changed, filled

FLOATS = ["float16", "bfloat16", "float32"]
INTEGERS = ["int8", "int16", "int32", "int64"]
UNSIGNED = ["uint16", "uint32", "uint64"]
EIGHT_BIT_FLOATS = ["float8_e4m3fn", "float8_e5m2"]
DTYPES = [*FLOATS, *INTEGERS, *UNSIGNED, *EIGHT_BIT_FLOATS, "bool", "uint8", "float64"]

ALL_REDUCED = {
    **{op: {*FLOATS, *INTEGERS, "bool", "uint8"} for op in ("SUM", "MIN", "MAX")},
    "PRODUCT": {"float16", "float32", "int8", "int32", "int64", "bool", "uint8"},
    "AVG": {*FLOATS},
    **{op: set() for op in ("BAND", "BOR", "BXOR")},
}
# reduce-scatter does not compute bool and uint8 as int32
SCATTERED = {op: dtypes - {"bool", "uint8"} for op, dtypes in ALL_REDUCED.items()}
MOVED = {*FLOATS, *INTEGERS, *UNSIGNED, "bool", "uint8", "float64"}

COMPUTE = {
    "SUM": operator.add,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "PRODUCT": operator.mul,
    "AVG": lambda a, b: (a + b) / 2,
}


def values(rank: int, dtype: str) -> torch.Tensor:
    numbers = [[0, 1, 1, 0], [0, 0, 1, 1]] if dtype == "bool" else [[3, 5, 100, 2], [4, 2, 100, 5]]
    return torch.tensor(numbers[rank], dtype=torch.float32).to(getattr(torch, dtype))


def attempt(function) -> torch.Tensor | str:
    """What a call gives, if it gives anything, or what it says where it is refused."""
    try:
        given = function()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "" if given is None else given.cpu()


def reduce_all() -> dict:
    given = {dtype: values(dist.get_rank(), dtype).to("npu") for dtype in DTYPES}
    forms = {
        "all_reduce": lambda x, op: changed(x, lambda y: dist.all_reduce(y, op)),
        "reduce_scatter": lambda x, op: filled(x, (2,), lambda o: dist.reduce_scatter_tensor(o[0], x, op=op)),
    }
    return {
        (form, op, dtype): attempt(functools.partial(forms[form], given[dtype], getattr(dist.ReduceOp, op)))
        for form, op, dtype in itertools.product(forms, ALL_REDUCED, DTYPES)
    }


def test_reductions_by_dtype(two_ranks: Processes) -> None:
    for rank, results in enumerate(two_ranks.run(reduce_all)):
        for (form, op, dtype), result in results.items():
            allowed = ALL_REDUCED if form == "all_reduce" else SCATTERED
            if dtype not in allowed[op]:
                assert isinstance(result, str), (form, op, dtype, result)
                assert dtype in result or f"Cannot use ReduceOp.{op} with HCCL; it has SUM, AVG" in result, result
                continue
            # integers wrap; two numbers have one rounding in any order
            numbers = [values(r, dtype).int() if dtype == "bool" else values(r, dtype) for r in range(2)]
            expected = COMPUTE[op](*numbers)  # of bools as int32: any number but 0 is true
            expected = expected.to(getattr(torch, dtype))
            own = expected[2 * rank : 2 * rank + 2] if form == "reduce_scatter" else expected
            assert isinstance(result, torch.Tensor), (form, op, dtype, result)
            assert torch.equal(result.view(torch.uint8), own.view(torch.uint8)), (form, op, dtype, result, own)


def twice(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.view(torch.uint8)] * 2).view(x.dtype)


# forms in which rank 1 gives what it has to both
MOVES = {
    "broadcast": lambda x: changed(x, lambda y: dist.broadcast(y, 1)),
    "all_gather": lambda x: filled(x, (4, 4), lambda o: dist.all_gather(o, x))[4:],
    "all_gather_into_tensor": lambda x: filled(x, (8,), lambda o: dist.all_gather_into_tensor(o[0], x))[4:],
    "all_to_all": lambda x: filled(x, (4, 4), lambda o: dist.all_to_all(o, [x, x]))[4:],
    "all_to_all_single": lambda x: filled(x, (8,), lambda o: dist.all_to_all_single(o[0], twice(x)))[4:],
    "send": lambda x: changed(x, lambda y: dist.send(y, 0) if dist.get_rank() else dist.recv(y, 1)),
}


def move_all() -> dict:
    return {
        (form, dtype): attempt(functools.partial(move, values(dist.get_rank(), dtype).to("npu")))
        for dtype, (form, move) in itertools.product(DTYPES, MOVES.items())
    }


def test_moves_by_dtype(two_ranks: Processes) -> None:
    for results in two_ranks.run(move_all):
        for (form, dtype), result in results.items():
            if dtype in MOVED or (form == "all_to_all" and dtype in EIGHT_BIT_FLOATS):  # which goes as bytes
                assert isinstance(result, torch.Tensor), (form, dtype, result)
                assert torch.equal(result.view(torch.uint8), values(1, dtype).view(torch.uint8)), (form, dtype)
            else:
                assert f"Unsupported data type for HCCL process group torch.{dtype}; it takes int8" in result, result


def break_rules() -> dict[str, torch.Tensor | str]:
    rank, npu = dist.get_rank(), torch.device("npu", dist.get_rank())
    x = torch.ones(4, 4, device=npu)
    half = x.half()

    def outputs(*sizes: int) -> list[torch.Tensor]:
        return [torch.empty(size, device=npu) for size in sizes]

    calls = {
        "strides": lambda: dist.all_reduce(x.t()[:2]),
        "strides of an output": lambda: dist.reduce_scatter_tensor(torch.empty(4, 4, device=npu)[:, :2], x),
        "gaps in a list": lambda: dist.all_gather([x[:, :2], x[:, :2]], x[:, :2].contiguous()),
        "host": lambda: dist.all_gather([torch.ones(4, 4), torch.ones(4, 4)], x),
        "two dtypes": lambda: dist.all_gather_into_tensor(torch.empty(8, 4, device=npu), half),
        "gathered size": lambda: dist.all_gather_into_tensor(torch.empty(7, 4, device=npu), x),
        "scattered size": lambda: dist.reduce_scatter_tensor(torch.empty(3, 4, device=npu), x),
        "length of a list": lambda: dist.all_gather(outputs(1, 1, 1), outputs(1)[0]),
        "uneven rows": lambda: dist.all_to_all_single(torch.empty(3, device=npu), torch.empty(3, device=npu)),
        "split sizes": lambda: dist.all_to_all_single(*outputs(4, 4), [1, 2], [2, 2]),
        "number of splits": lambda: dist.all_to_all_single(*outputs(4, 4), [4], [2, 2]),
        "scalar": lambda: dist.all_to_all_single(torch.tensor(1.0, device=npu), torch.tensor(1.0, device=npu)),
        "any source": lambda: dist.recv(x),
        "several tensors": lambda: dist.group.WORLD.allreduce([x, x]),
        "premultiplied integers": lambda: dist.all_reduce(x.int(), dist.ReduceOp.PREMUL_SUM(0.5)),
        "average of integers": lambda: dist.all_reduce(x.int(), dist.ReduceOp.AVG),
        "beyond the devices": lambda: torch.npu.set_device(DEVICES),
        "another device": lambda: dist.all_reduce(torch.ones(1, device=torch.device("npu", 1 - rank))),
    }
    dist.all_reduce(x)  # the device is known
    return {name: attempt(call) for name, call in calls.items()}


MESSAGES = {
    "strides": "HCCL allreduce: Tensors must be contiguous; given float32 [2, 4] with strides [1, 4]: call",
    "strides of an output": "Tensors must be contiguous; given float32 [4, 2] with strides [4, 1]",
    "gaps in a list": "Tensors must be non-overlapping and dense; given float32 [4, 2] with strides [4, 1]",
    "host": "Tensors must be NPU and dense; given torch.strided on cpu",
    "two dtypes": "Tensors must have identical type; given float16 [4, 4] and float32 [8, 4]",
    "gathered size": "size of a part times world size, 2; given float32 [7, 4] and float32 [4, 4]",
    "scattered size": "size of a part times world size, 2; given float32 [4, 4] and float32 [3, 4]",
    "length of a list": "a tensor for each of the 2 ranks; given 3",
    "uneven rows": "dim 0 does not divide equally across 2 ranks; given float32 [3]",
    "split sizes": "Split sizes doesn't match total dim 0 size; given [1, 2] for float32 [4]",
    "number of splits": "Number of tensor splits not equal to group size, 2; given [4]",
    "scalar": "Scalar tensors (0-dim tensors) are not supported",
    "any source": "ProcessGroupHCCL does not support recv",
    "several tensors": "one tensor a process, on one NPU; given 2",
    "premultiplied integers": "ReduceOp.PREMUL_SUM of torch.int32; it takes float16, bfloat16, float32",
    "average of integers": "ReduceOp.AVG of torch.int32; it takes float16, bfloat16, float32",
    "beyond the devices": f"There is no device {DEVICES}: the software devices are 0 to {DEVICES - 1}.",
    "another device": "HCCL supports one NPU per process",
}


def test_each_rule_has_its_message(two_ranks: Processes) -> None:
    for messages in two_ranks.run(break_rules):
        assert messages.keys() == MESSAGES.keys()
        for name, message in messages.items():
            assert MESSAGES[name] in message, (name, message)


def disagree(what: str) -> torch.Tensor | str:
    """In a group of its own, which ends with it."""
    rank, group = dist.get_rank(), dist.new_group()
    device = torch.device("npu", 0 if what == "device" else rank)
    x = torch.ones(3 if what == "size" and rank else 2, device=device)
    if what == "dtype" and rank:
        x = x.half()
    broadcasts = what == "operator" and rank
    said = attempt(lambda: dist.broadcast(x, 0, group=group) if broadcasts else dist.all_reduce(x, group=group))
    dist.destroy_process_group(group)
    return said


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("size", "all_reduce(SUM, float32, 2) on rank 0 and all_reduce(SUM, float32, 3) on rank 1"),
        ("dtype", "all_reduce(SUM, float32, 2) on rank 0 and all_reduce(SUM, float16, 2) on rank 1"),
        ("operator", "all_reduce(SUM, float32, 2) on rank 0 and broadcast(float32, 2, from 0) on rank 1"),
        ("device", "both on device 0, and a device serves one rank. Call torch.npu.set_device(local_rank)"),
    ],
)
def test_ranks_that_differ_are_told_so(two_ranks: Processes, what: str, message: str) -> None:
    messages = two_ranks.run(disagree, what)
    mirrored = " and ".join(reversed(message.split(" and "))) if " on rank" in message else message
    assert any(message in text or mirrored in text for text in messages), messages
    assert all(message in text or mirrored in text or "by peer" in text for text in messages), messages
