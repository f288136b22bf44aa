"""What runs for activations and dropout."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kernels_ext_npu.measuring.inside.table import Call, Kernel, computed, nbytes, one_kernel, promoted, row

one_kernel("silu", kernel="Swish", source="ops-nn activation/swish/op_api/aclnn_silu.cpp:61-112")
one_kernel(
    "silu_backward", kernel="SiluGrad", source="ops-nn activation/silu_grad, aclnn_silu_backward.cpp 9.1.0:148-191"
)
one_kernel("gelu", kernel="Gelu", source="ops-nn activation/gelu, gelu_v2, aclnn_gelu.cpp and aclnn_gelu_v2.cpp")
one_kernel("softplus", kernel="SoftplusV2", source="ops-nn activation/softplus_v2, aclnn_softplus.cpp 9.1.0:110-153")


@row(
    "softplus_backward",
    source="ops-nn activation/softplus_v2_grad/op_host/op_api/aclnn_softplus_backward.cpp 8.5.0:141-167 9.x:140-166; "
    "op-plugin op_plugin_functions.yaml",
)
def _softplus_backward(call: Call) -> Iterable[Kernel]:
    """SoftplusV2Grad, in float32 where the gradient and the tensor differ in dtype, which are cast then."""
    grad, tensor = call.tensor("grad_output"), call.tensor("self")
    return computed(call, "SoftplusV2Grad", [grad, tensor], grad.dtype if grad.dtype is tensor.dtype else torch.float32)


one_kernel("relu", kernel="Relu", source="ops-nn activation/relu/op_api/aclnn_relu.cpp:88-124")
one_kernel("threshold_backward", kernel="ReluGrad", source="ops-nn activation/threshold_grad_v2_d 9.1.0:103-159")
one_kernel("hardtanh_backward", kernel="HardtanhGrad", source="ops-nn activation/hardtanh_grad, …_backward.cpp:95-150")


@row(
    "sigmoid_backward",
    "gelu_backward",
    source="ops-nn activation/sigmoid_grad/op_api/aclnn_sigmoid_backward.cpp:142-212, gelu_grad, gelu_grad_v2",
)
def _backward(call: Call) -> Iterable[Kernel]:
    """One kernel, in the dtype to which the gradient and the tensor promote."""
    operands = call.operands("grad_output", "output", "self")
    kernel = "SigmoidGrad" if call.name == "sigmoid_backward" else "GeluGrad"
    return computed(call, kernel, operands, promoted(operands))


_DROPOUT = "op-plugin NativeDropoutKernelNpuOpApi.cpp; ops-math random/dsa_gen_bit_mask and random/drop_out_do_mask"


def _bits(tensor: Tensor) -> int:
    """Return the bytes of a mask of one bit for each element, of 128 at a time."""
    return -(-tensor.numel() // 128) * 16


@row("native_dropout", source=_DROPOUT)
def _native_dropout(call: Call) -> Iterable[Kernel]:
    """Those of `_npu_dropout`; where nothing or all is left out, a TensorMove or Fill, and a Fill of the mask."""
    given, p, train = call.tensor("input"), call.given["p"], call.given["train"]
    if p in (0, 1) or train is False:
        is_kept = p == 0 or train is False
        yield call.main("TensorMove" if is_kept else "Fill", (1 + is_kept) * nbytes(given))
        yield Kernel("Fill", given.numel())
        return
    yield Kernel("DSAGenBitMask", _bits(given))
    yield call.main("DropOutDoMask", 2 * nbytes(given) + _bits(given))


@row("native_dropout_backward", source=_DROPOUT)
def _native_dropout_backward(call: Call) -> Iterable[Kernel]:
    """DropOutDoMask; a TensorMove where nothing was left out, and a Fill where everything was."""
    grad, scale = call.tensor("grad_output"), call.given["scale"]
    if scale in (0, 1):
        yield call.main("TensorMove" if scale else "Fill", (1 + bool(scale)) * nbytes(grad))
    else:
        yield call.main("DropOutDoMask", 2 * nbytes(grad) + _bits(grad))


@row(
    "glu",
    source="ops-nn activation/sigmoid/op_api/aclnn_glu.cpp 8.5.0:149, activation/glu/op_host/op_api/aclnn_glu.cpp "
    "9.0.0:150-186 9.1.0:150",
)
def _glu(call: Call) -> Iterable[Kernel]:
    """Glu; before 9.0 SplitV, Sigmoid and Mul."""
    both, half = nbytes(call.tensor("self")), nbytes(call.result)
    if call.cann >= (9, 0):
        yield call.main("Glu")
        return
    yield Kernel("SplitV", 2 * both, workspace=both)
    yield Kernel("Sigmoid", 2 * half, workspace=half)
    yield call.main("Mul", 3 * half)


@row("glu_backward", source="ops-nn activation/sigmoid/op_api/aclnn_glu_backward.cpp 8.5.0:172-262 9.1.0:175-239")
def _glu_backward(call: Call) -> Iterable[Kernel]:
    """SplitV, Sigmoid, Mul, Mul, Sub, Mul and ConcatD."""
    both = nbytes(call.tensor("self"))
    half = both // 2
    yield Kernel("SplitV", 2 * both, workspace=both)
    yield Kernel("Sigmoid", 2 * half, workspace=half)
    for name in ("Mul", "Mul", "Sub"):
        yield Kernel(name, 3 * half, workspace=half)
    yield call.main("Mul", 3 * half, workspace=half)
    yield Kernel("ConcatD", 2 * both)
