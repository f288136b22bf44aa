"""What runs for losses, softmax with a mask, and linear layers of torch_npu."""

from __future__ import annotations

from collections.abc import Iterable

from kernels_ext_npu.measuring.inside.table import Call, Kernel, if_transposed, nbytes, one_kernel, row

one_kernel(
    "npu_cross_entropy_loss",
    kernel="CrossEntropyLoss",
    source="op-plugin op_plugin_functions.yaml; ops-nn loss/cross_entropy_loss/op_host/cross_entropy_loss_def.cpp",
)
one_kernel(
    "npu_scaled_masked_softmax",
    kernel="ScaledMaskedSoftmaxV2",
    source="op-plugin ScaledMaskedSoftmaxKernelNpuOpApi.cpp; ops-nn vfusion/scaled_masked_softmax_v2/op_host",
)
one_kernel(
    "npu_fused_linear_online_max_sum",
    kernel="FusedLinearOnlineMaxSum",
    source="op-plugin FusedLinearCrossEntropyLossKernelNpuOpApi.cpp; ops-nn matmul/fused_linear_online_max_sum/…/"
    "aclnn_fused_linear_online_max_sum.cpp 8.5.0:272-276 9.1.0:272-276 and its tiling 8.5.0:269-273",
)


@row(
    "npu_fused_linear_cross_entropy_loss_with_max_sum_backward",
    source="op-plugin FusedLinearCrossEntropyLossKernelNpuOpApi.cpp; ops-nn "
    "matmul/fused_linear_cross_entropy_loss_grad/op_host/fused_linear_cross_entropy_loss_grad_tiling.cpp "
    "8.5.0:560-569 9.0.0:560-569 9.1.0:560-583",
)
def _linear_cross_entropy_backward(call: Call) -> Iterable[Kernel]:
    """FusedLinearCrossEntropyLossGrad. Without a softmax it computes logits again, and sums gradients up in float32 in
    its workspace, which are written and read at least once; CANN 8.5 has two of these."""
    if call.given["softmax"] is not None:
        yield call.main("FusedLinearCrossEntropyLossGrad")
        return
    sums = 4 * (call.given["input"].numel() + call.given["weight"].numel())
    kept = sums * (2 if call.cann < (9, 0) else 1)
    yield call.main("FusedLinearCrossEntropyLossGrad", call.moved + 2 * sums, workspace=kept)


one_kernel(
    "npu_linear",
    kernel="MatMulV3",
    source="op-plugin LinearKernelNpuOpApi.cpp, `npu_linear`, which is `aclnnMm` of a transposed view, or `aclnnAddmm`",
    reads_in_place=if_transposed,
)


@row(
    "npu_linear_backward",
    source="op-plugin LinearKernelNpuOpApi.cpp, `npu_linear_backward`, which is `aclnnMm` twice",
    reads_in_place=if_transposed,
)
def _linear_backward(call: Call) -> Iterable[Kernel]:
    """MatMulV3 for the gradient of the input, and one for that of the weight; both read the gradient."""
    grad, given, weight = (nbytes(call.tensor(*names)) for names in (("grad",), ("input", "self"), ("weight",)))
    yield Kernel("MatMulV3", grad + weight + nbytes(call.results[0]))
    yield call.main("MatMulV3", grad + given + nbytes(call.results[1]))
