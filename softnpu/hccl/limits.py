"""Check what HCCL accepts: dtypes, reductions and layouts. Errors have torch_npu's words, the given and the allowed.

Sources, both for Atlas A2, which is the chip that the software device says it is (Ascend910B1):

- torch_npu, ``torch_npu/csrc/distributed/ProcessGroupHCCL.cpp`` (``checkSupportedDataType``, ``getHcclReduceOp``,
  ``check_npu_tensors_different_devices``, ``check_npu_tensors_same_device``, ``check_split_sizes`` and the functions
  of the collectives) and ``HCCLUtils.cpp`` (``kScalarTypeToHcclDataType``): https://github.com/Ascend/pytorch
- HCCL, ``docs/zh/api_ref/comm_op_interface``: HcclAllReduce, HcclReduce and HcclReduceScatter for reductions,
  HcclAllGather and HcclAllGatherV for what only moves: https://gitcode.com/cann/hccl
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from softnpu.argument_checks import describe, require

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)

# all that a reduction adds up. float64 needs Ascend950.
REDUCED = (*INTEGERS, *FLOATS)

# all-reduce and reduce compute these as int32, and cast the result back: a sum of booleans is an or. Reduce-scatter
# does not.
CAST_TO_INT32 = (torch.bool, torch.uint8)

# torch_npu computes AVG as a sum that it divides in place, and PREMUL_SUM by multiplying in place before the sum:
# both need floating point. HCCL has no product of int16 and bfloat16.
REDUCTIONS = {
    "SUM": REDUCED,
    "AVG": FLOATS,
    "PRODUCT": (torch.int8, torch.int32, torch.int64, torch.float16, torch.float32),
    "MIN": REDUCED,
    "MAX": REDUCED,
    "PREMUL_SUM": FLOATS,
}

# what broadcast, all-gather, scatter, all-to-all, send and receive move. 8 bit floats need Ascend950; a list of them
# can be exchanged all-to-all, which torch_npu does as bytes.
MOVED = (*REDUCED, *CAST_TO_INT32, torch.uint16, torch.uint32, torch.uint64, torch.float64)
MOVED_AS_BYTES = (torch.float8_e4m3fn, torch.float8_e5m2)


def require_moved(name: str, tensors: Iterable[Tensor], allowed: Sequence[torch.dtype] = MOVED) -> None:
    """Refuse tensors to move in dtypes that HCCL does not move."""
    for tensor in tensors:
        _require_dtype(name, tensor.dtype, allowed, "Unsupported data type for HCCL process group")


def require_reduced(name: str, tensors: Iterable[Tensor], reduction: str) -> None:
    """Refuse tensors to reduce in dtypes that HCCL does not reduce, or not with this reduction."""
    casts = () if "scatter" in name else CAST_TO_INT32
    for tensor in tensors:
        _require_dtype(name, tensor.dtype, (*REDUCED, *casts), "Unsupported data type")
        _require(
            name,
            reduction in REDUCTIONS,
            f"Cannot use ReduceOp.{reduction} with HCCL; it has {', '.join(REDUCTIONS)}",
        )
        computed = torch.int32 if tensor.dtype in casts else tensor.dtype
        given = str(tensor.dtype) if tensor.dtype is computed else f"{tensor.dtype}, computed as {computed}"
        allowed = REDUCTIONS[reduction]
        _require(name, computed in allowed, f"ReduceOp.{reduction} of {given}; it takes {_names(allowed)}")


def require_one(name: str, tensors: Sequence[Tensor]) -> Tensor:
    """Return the one tensor of this process out of a list; refuse longer lists and what is not dense and contiguous."""
    _require(name, len(tensors) == 1, f"one tensor a process, on one NPU; given {len(tensors)}")
    require_contiguous(name, tensors)
    return tensors[0]


def require_contiguous(name: str, tensors: Iterable[Tensor]) -> None:
    """Refuse tensors that are not contiguous, each in its memory format."""
    for tensor in tensors:
        _require_npu(name, tensor)
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        in_order = tensor.is_contiguous() or (
            tensor.dim() in formats and tensor.is_contiguous(memory_format=formats[tensor.dim()])
        )
        _require(name, in_order, f"Tensors must be contiguous; given {_layout(tensor)}: call .contiguous()")


def require_list(name: str, tensors: Sequence[Tensor], like: Tensor, ranks: int) -> None:
    """Refuse lists without one tensor for each rank, of one dtype, each of them without gaps."""
    _require(name, len(tensors) == ranks, f"a list with a tensor for each of the {ranks} ranks; given {len(tensors)}")
    for tensor in tensors:
        _require_npu(name, tensor)
        require_same_type(name, like, tensor)
        gapless = torch._prims_common.is_non_overlapping_and_dense_or_false(tensor)
        _require(name, gapless, f"Tensors must be non-overlapping and dense; given {_layout(tensor)}")


def require_same_type(name: str, first: Tensor, second: Tensor) -> None:
    """Refuse an input and an output of two dtypes."""
    _require(name, first.dtype == second.dtype, f"Tensors must have identical type; given {_both(first, second)}")


def require_size(name: str, whole: Tensor, part: Tensor, ranks: int) -> None:
    """Refuse a ``whole`` that does not have the elements of ``part`` for each rank."""
    _require(
        name,
        whole.numel() == part.numel() * ranks,
        f"the whole must have the size of a part times world size, {ranks}; given {_both(whole, part)}",
    )


def require_splits(name: str, tensor: Tensor, splits: Sequence[int], ranks: int) -> None:
    """Refuse parts that are not the first dimension of the tensor together; without splits, the parts are equal."""
    _require(name, tensor.dim() > 0, "Scalar tensors (0-dim tensors) are not supported; reshape to at least 1-D")
    if not splits:
        equal = tensor.size(0) % ranks == 0
        _require(name, equal, f"Tensor's dim 0 does not divide equally across {ranks} ranks; given {describe(tensor)}")
        return
    _require(name, len(splits) == ranks, f"Number of tensor splits not equal to group size, {ranks}; given {splits}")
    fits = sum(splits) == tensor.size(0)
    _require(name, fits, f"Split sizes doesn't match total dim 0 size; given {splits} for {describe(tensor)}")


def _require_npu(name: str, tensor: Tensor) -> None:
    dense = tensor.device.type == "npu" and tensor.layout == torch.strided
    _require(name, dense, f"Tensors must be NPU and dense; given {tensor.layout} on {tensor.device}")


def _require_dtype(name: str, given: torch.dtype, allowed: Sequence[torch.dtype], rule: str) -> None:
    _require(name, given in allowed, f"{rule} {given}; it takes {_names(allowed)}")


def _require(name: str, condition: bool, rule: str) -> None:
    require(condition, f"HCCL {name.rstrip('_')}", rule)


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _layout(tensor: Tensor) -> str:
    return f"{describe(tensor)} with strides {list(tensor.stride())}"


def _both(first: Tensor, second: Tensor) -> str:
    return f"{describe(first)} and {describe(second)}"
