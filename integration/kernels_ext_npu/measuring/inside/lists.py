"""What runs for operators on lists of tensors, which optimizers call."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kernels_ext_npu.measuring.inside.table import Call, Kernel, cast, nbytes, row

_TENSORS = 48  # that a launch takes, in all of its lists and with its results

_LISTED = tuple(
    f"_foreach_{name}"
    for name in (
        "abs", "add", "addcdiv", "addcmul", "div", "exp", "lerp", "log", "maximum", "minimum", "mul", "neg", "norm",
        "pow", "reciprocal", "sigmoid", "sqrt", "sub", "tanh"
    )
)  # fmt: skip
_ALONE = ("_foreach_addcdiv", "_foreach_addcmul")  # which op-plugin takes apart where each tensor has a number


@row(*_LISTED, source="op-plugin Foreach*KernelNpuOpApi.cpp, `_split_and_exec_npu_cmd_*`, the same in 7.3.0 to 26.1.0")
def _foreach(call: Call) -> Iterable[Kernel]:
    """One kernel for 48 tensors, those of all lists and of the results together: 48 in place with a number, 24 of two
    lists. One for each tensor where dtypes differ, and for ``addcdiv`` and ``addcmul`` with a list of numbers."""
    lists = [value for value in call.given.values() if _is_list(value)]
    count, name = len(lists[0]), call.name.rstrip("_")
    is_alone = name in _ALONE and isinstance(call.given.get("scalars"), list | tuple)
    if is_alone or len({tensor.dtype for tensors in lists for tensor in tensors}) > 1:
        at_once = 1
    else:
        at_once = _TENSORS // (len(lists) + (not call.name.endswith("_")))
    for start in range(0, count, at_once):
        moved = call.moved * min(at_once, count - start) // count
        yield Kernel(name.strip("_").title(), moved, is_main=start == 0)


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Tensor)


@row("_fused_adamw", source="op-plugin FusedAdamWKernelNpuOpApi.cpp; ops-nn optim/apply_adam_w_v2 9.1.0:148-256")
def _fused_adamw(call: Call) -> Iterable[Kernel]:
    """For each tensor a Sub of its step, and ApplyAdamWV2; where a tensor and its states differ in dtype, casts to
    float32 before and back behind."""
    lists = [call.given[name] for name in ("self", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs") if call.given[name]]
    for number, gradient in enumerate(call.given["grads"]):
        held = [tensors[number] for tensors in lists]
        step = call.given["state_steps"][number]
        yield Kernel("Sub", 2 * nbytes(step), workspace=nbytes(step))
        dtypes = {tensor.dtype for tensor in (*held, gradient)}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        for tensor in (*held, gradient):
            yield from cast(tensor, dtype)
        moved = 2 * sum(nbytes(tensor, dtype) for tensor in held) + nbytes(gradient, dtype) + nbytes(step)
        yield call.main("ApplyAdamWV2", moved)
        for tensor in held:
            if tensor.dtype is not dtype:
                yield Kernel("Cast", nbytes(tensor, dtype) + nbytes(tensor))
