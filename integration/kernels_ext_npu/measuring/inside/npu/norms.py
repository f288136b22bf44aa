"""What runs for norms, and for rotations of queries and keys."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from kernels_ext_npu.measuring.inside.table import Call, Kernel, cast, nbytes, one_kernel, row

for _operator, _kernel, _folder in (
    ("npu_rms_norm", "RmsNorm", "rms_norm"),
    ("npu_rms_norm_backward", "RmsNormGrad", "rms_norm_grad"),
    ("npu_gemma_rms_norm", "GemmaRmsNorm", "gemma_rms_norm"),
    ("npu_add_rms_norm", "AddRmsNorm", "add_rms_norm"),
):
    one_kernel(
        _operator,
        kernel=_kernel,
        source=f"op-plugin op_plugin_functions.yaml, {_kernel}*KernelOpApi.cpp; ops-nn norm/{_folder}/op_host/"
        f"{_folder}_def.cpp (`AutoContiguous`) and {_folder}_tiling.cpp",
    )


@row(
    "npu_add_layer_norm",
    source="op-plugin AddLayerNormKernelNpuOpApi.cpp; ops-nn norm/add_layer_norm/op_host/add_layer_norm_def.cpp",
)
def _add_layer_norm(call: Call) -> Iterable[Kernel]:
    """AddLayerNorm, which writes the sum where ``additional_output`` asks for it."""
    unwritten = 0 if call.given["additional_output"] else nbytes(call.results[3])
    yield call.main("AddLayerNorm", call.moved - unwritten)


@row(
    "npu_rotary_mul",
    source="op-plugin RotaryMulKernelNpuOpApi.cpp; ops-transformer posembedding/rotary_position_embedding/op_host/"
    "op_api/aclnn_rotary_position_embedding.cpp 8.5.0:37-70 9.1.0:37-70",
)
def _rotary_mul(call: Call) -> Iterable[Kernel]:
    """RotaryPositionEmbedding, in the dtype of what is rotated; tables of another one are cast before it."""
    yield from _rotate(call, "RotaryPositionEmbedding", call.given["input" if "input" in call.given else "self"])


@row(
    "npu_rotary_mul_backward",
    source="op-plugin RotaryMulBackwardKernelNpuOpApi.cpp; ops-transformer posembedding/rotary_position_embedding_grad/"
    "op_host/rotary_position_embedding_grad_def.cpp (`AutoContiguous`)",
)
def _rotary_mul_backward(call: Call) -> Iterable[Kernel]:
    """RotaryPositionEmbeddingGrad, in the dtype of what was rotated; a gradient and tables of another one are cast
    before it. It reads what was rotated, and writes gradients of the tables, only where these need one."""
    rotated = call.given["input" if "input" in call.given else "self"]
    tables = [call.given[name] for name in ("r1", "r2")]
    unread = 0
    if not any(table.requires_grad for table in tables):
        unread = nbytes(rotated) + sum(map(nbytes, call.results[1:]))
    yield from _rotate(call, "RotaryPositionEmbeddingGrad", rotated, unread)


def _rotate(call: Call, kernel: str, rotated: Tensor, unread: int = 0) -> Iterable[Kernel]:
    operands = [call.given[name] for name in ("grad", "r1", "r2") if name in call.given]
    for operand in operands:
        yield from cast(operand, rotated.dtype)
    after_casts = sum(nbytes(operand, rotated.dtype) - nbytes(operand) for operand in operands)
    yield call.main(kernel, call.moved + after_casts - unread)


def _is_strided_by_token(operand: Tensor) -> bool:
    """Tell whether the elements of a token lie side by side."""
    return operand.dim() > 1 and operand.stride(-1) == 1 and operand.is_floating_point()


@row(
    "npu_mrope",
    source="op-plugin RopeWithSinCosCacheKernelNpuOpApi.cpp; ops-transformer posembedding/rope_with_sin_cos_cache/"
    "op_host/op_api/aclnn_rope_with_sin_cos_cache.cpp 9.1.0:240-270",
    reads_in_place=_is_strided_by_token,
)
def _mrope(call: Call) -> Iterable[Kernel]:
    """RopeWithSinCosCache, which reads the rows of the table that positions name, and queries and keys with the stride
    of a token."""
    table, positions = call.given["cos_sin_cache"], call.given["positions"]
    read = min(nbytes(table), positions.numel() * nbytes(table[:1]))
    yield call.main("RopeWithSinCosCache", call.moved - nbytes(table) + read)
