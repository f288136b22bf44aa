"""What runs for activations, dropout and casts."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kernels_ext_npu.measuring.inside.table import Call, Kernel, nbytes, one_kernel, row

for _operator, _kernel, _source in (
    ("npu_swiglu", "SwiGlu", "activation/swi_glu/op_host/swi_glu_def.cpp (`AutoContiguous`)"),
    ("npu_swiglu_backward", "SwiGluGrad", "activation/swi_glu_grad/op_host/swi_glu_grad_def.cpp (`AutoContiguous`)"),
    ("npu_clipped_swiglu", "ClippedSwiglu", "activation/clipped_swiglu/op_host/clipped_swiglu_def.cpp"),
    ("npu_geglu", "GeGluV2", "activation/ge_glu_v2/op_host/op_api/aclnn_geglu.cpp 8.5.0:193-205 9.1.0:210-222"),
    *(
        (
            name,  # the second is that of SwiGLU's package, around the first
            "GeGluGradV2",
            "activation/ge_glu_grad_v2/op_host/op_api/aclnn_geglu_backward.cpp 8.5.0:198-215 9.1.0:206-223",
        )
        for name in ("npu_geglu_grad", "geglu_grad")
    ),
    ("npu_fast_gelu", "FastGelu", "activation/fast_gelu/op_api/aclnn_fast_gelu.cpp 8.5.0:122-130 9.1.0:123-131"),
    (
        "npu_fast_gelu_backward",
        "FastGeluGrad",
        "activation/fast_gelu_grad/op_api/aclnn_fast_gelu_backward.cpp 8.5.0:132-144 9.1.0:133-145",
    ),
    ("npu_gelu", "GeluV2", "activation/gelu_v2/…/aclnn_gelu_v2.cpp 8.5.0:111-120 9.1.0:111-120"),
):
    one_kernel(_operator, kernel=_kernel, source=f"op-plugin op_plugin_functions.yaml; ops-nn {_source}")

one_kernel("npu_silu", kernel="Swish", source="op-plugin op_plugin_functions.yaml, an operator of its graph engine")


@row("npu_dtype_cast", source="op-plugin CastKernelNpuOpApi.cpp; ops-math math/cast/op_api/aclnn_cast.cpp")
def _dtype_cast(call: Call) -> Iterable[Kernel]:
    """Cast; nothing is read or written where the dtype is the same."""
    given = call.tensor("input", "self")
    yield call.main("Cast", 0 if given.dtype is call.result.dtype else nbytes(given) + nbytes(call.result))


@row(
    "_npu_dropout",
    source="op-plugin NativeDropoutKernelNpuOpApi.cpp, `_npu_dropout`; ops-math "
    "random/dsa_gen_bit_mask and random/drop_out_do_mask",
)
def _dropout(call: Call) -> Iterable[Kernel]:
    """DSAGenBitMask writes a mask of one bit for each element, DropOutDoMask reads it."""
    mask = next(tensor for tensor in call.results if tensor.dtype is torch.uint8)
    yield Kernel("DSAGenBitMask", nbytes(mask))
    yield call.main("DropOutDoMask", call.moved)
