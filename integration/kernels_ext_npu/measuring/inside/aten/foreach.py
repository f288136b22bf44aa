"""What runs for operators on lists of tensors, which optimizers call."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kernels_ext_npu.measuring.inside.table import HALF, Call, Kernel, cast, nbytes, row

_TENSORS = 48  # that a launch takes, in all of its lists and with its results

_LISTED = tuple(
    f"_foreach_{name}"
    for name in (
        "abs", "add", "addcdiv", "addcmul", "div", "exp", "lerp", "log", "maximum", "minimum", "mul", "neg", "norm",
        "pow", "reciprocal", "sigmoid", "sqrt", "sub", "tanh"
    )
)  # fmt: skip


@row(*_LISTED, source="op-plugin Foreach*KernelNpuOpApi.cpp, `_split_and_exec_npu_cmd_*`, the same in 7.3.0 to 26.1.0")
def _foreach(call: Call) -> Iterable[Kernel]:
    """One kernel for 48 tensors, those of all lists and of the results together: 48 in place with a number, 24 of two
    lists. One for each tensor where dtypes differ, and for ``addcdiv`` and ``addcmul`` with a list of numbers."""
    given = [value for value in call.given.values() if isinstance(value, list | tuple)]
    lists = [value for value in given if value and isinstance(value[0], Tensor)]
    count, name = len(lists[0]), call.name.rstrip("_")
    is_alone = name in ("_foreach_addcdiv", "_foreach_addcmul") and isinstance(call.given.get("scalars"), list | tuple)
    if is_alone or len({tensor.dtype for tensors in lists for tensor in tensors}) > 1:
        at_once = 1
    else:
        at_once = _TENSORS // (len(lists) + (not call.name.endswith("_")))
    for start in range(0, count, at_once):
        moved = call.moved * min(at_once, count - start) // count
        yield Kernel(name.strip("_").title(), moved, is_main=start == 0)


@row(
    "_foreach_zero_",
    source="op-plugin ForeachZeroInplaceKernelNpuOpApi.cpp 26.1.0:55-80; torch, ATen/native/ForeachUtils.h",
)
def _foreach_zero(call: Call) -> Iterable[Kernel]:
    """ForeachZeroInplace for 48 tensors; a ZerosLike for each where dtypes differ or are whole numbers."""
    tensors = call.given["self"]
    dtypes = {tensor.dtype for tensor in tensors}
    is_fast = len(dtypes) == 1 and tensors[0].is_floating_point()
    return _together(tensors, "ForeachZeroInplace" if is_fast else "ZerosLike", is_fast, [nbytes(t) for t in tensors])


@row("_foreach_copy_", source="op-plugin ForeachCopyKernelOpApi.cpp 26.1.0:72-95,236-312 7.1.0:45-94")
def _foreach_copy(call: Call) -> Iterable[Kernel]:
    """ForeachCopy for 48 tensors and what is copied to them, of one dtype, or from CANN 9.1 on of 16 bits and float32;
    otherwise a copy for each."""
    pairs = list(zip(call.given["self"], call.given["src"]))
    is_cast = call.cann >= (9, 1) and all(
        (a.dtype in HALF and b.dtype is torch.float32) or (b.dtype in HALF and a.dtype is torch.float32)
        for a, b in pairs
    )
    is_fast = is_cast or all(a.dtype is b.dtype for a, b in pairs)
    moved = [nbytes(a) + nbytes(b) for a, b in pairs]
    return _together(call.given["self"], "ForeachCopy" if is_fast else "TensorMove", is_fast, moved)


def _together(tensors: list[Tensor], kernel: str, is_fast: bool, moved: list[int]) -> Iterable[Kernel]:
    """Give a kernel for 48 tensors, or one for each."""
    at_once = _TENSORS if is_fast else 1
    for start in range(0, len(tensors), at_once):
        yield Kernel(kernel, sum(moved[start : start + at_once]), is_main=start == 0)


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
