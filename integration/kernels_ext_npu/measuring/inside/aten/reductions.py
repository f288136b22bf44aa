"""What runs for sums, extremes, norms, softmaxes, losses and what goes along a dimension."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kernels_ext_npu.measuring.inside.table import HALF, Call, Kernel, cast, computed, nbytes, one_kernel, row, written


def _reduced(call: Call, kernel: str, dtype: torch.dtype) -> Iterable[Kernel]:
    """Give the kernels of an operator that casts its tensor, computes, and casts to the dtype of its result."""
    return computed(call, kernel, [call.tensor("self")], dtype)


@row(
    "sum",
    "mean",
    source="ops-math math/reduce_sum/op_api/aclnn_reduce_sum.cpp 8.5.0:167-263 9.x:200-314, math/reduce_mean, "
    "aclnn_mean.cpp 8.5.0:206-252 9.x:241-305; op-plugin Sum, Mean",
)
def _sum(call: Call) -> Iterable[Kernel]:
    """One ReduceSum or ReduceMean, in the dtype of the result; a tensor of another one is cast as a whole first."""
    return _reduced(call, "ReduceSum" if call.name == "sum" else "ReduceMean", call.result.dtype)


@row(
    "amax",
    "amin",
    source="ops-math math/reduce_max/op_api/aclnn_amax.cpp 8.5.0:177-239 9.x:196-260, math/reduce_min",
)
def _amax(call: Call) -> Iterable[Kernel]:
    """One ReduceMax or ReduceMin; booleans are cast to float32 first."""
    dtype = call.tensor("self").dtype
    return _reduced(call, f"Reduce{call.name[1:].title()}", torch.float32 if dtype is torch.bool else dtype)


@row(
    "max",
    "min",
    source="ops-math math/reduce_max/op_api/aclnn_max.cpp 8.5.0:99-145 9.x:104-151, math/arg_max_with_value, "
    "aclnn_max_dim.cpp 8.5.0:128-186 9.x:123-181",
)
def _max(call: Call) -> Iterable[Kernel]:
    """One ReduceMax; along a dimension one ArgMaxWithValue, and a cast of its int32 places to int64. Booleans are cast
    to float32 first."""
    tensor = call.tensor("self")
    dtype = torch.float32 if tensor.dtype is torch.bool else tensor.dtype
    if len(call.results) == 1:
        yield from _reduced(call, f"Reduce{call.name.title()}", dtype)
        return
    yield from cast(tensor, dtype)
    values, places = call.results
    short = nbytes(places, torch.int32)
    yield call.main(f"Arg{call.name.title()}WithValue", nbytes(tensor, dtype) + nbytes(values, dtype) + short, short)
    yield Kernel("Cast", short + nbytes(places))


@row("argmax", "argmin", source="ops-math math/arg_max_v2/op_api/aclnn_argmax.cpp 8.5.0:166-224 9.x:170-228")
def _argmax(call: Call) -> Iterable[Kernel]:
    """One ArgMaxV2, and a cast of its int32 places to int64."""
    short = nbytes(call.result, torch.int32)
    yield call.main("ArgMaxV2", nbytes(call.tensor("self")) + short, workspace=short)
    yield Kernel("Cast", short + nbytes(call.result))


@row(
    "logsumexp",
    source="ops-math math/reduce_log_sum_exp/op_api/aclnn_logsumexp.cpp 8.5.0:195-289 9.x:195-294; op-plugin LogSumExp",
)
def _logsumexp(call: Call) -> Iterable[Kernel]:
    """ReduceMax, Abs, Equal and MaskedFill of the maxima, Sub into a float32 workspace as large as the tensor,
    ReduceLogSumExp of that, and Add; 16 bits are cast to float32 as a whole first, and the result back."""
    tensor, result = call.tensor("self"), call.result
    whole, few = nbytes(tensor, torch.float32), nbytes(result, torch.float32)
    yield from cast(tensor, torch.float32)
    yield Kernel("ReduceMax", whole + few, workspace=few)
    yield Kernel("Abs", 2 * few, workspace=few)
    yield Kernel("Equal", few + result.numel(), workspace=result.numel())
    yield Kernel("MaskedFill", 2 * few + result.numel(), workspace=few)
    yield Kernel("Sub", 2 * whole + few, workspace=whole)
    yield call.main("ReduceLogSumExp", whole + few, workspace=few)
    yield Kernel("Add", 3 * few, workspace=few * (result.dtype is not torch.float32))
    if result.dtype is not torch.float32:
        yield Kernel("Cast", few + nbytes(result))


@row(
    "softmax",
    "_softmax",
    "_log_softmax",
    source="ops-nn activation/softmax_v2/op_api/aclnn_softmax.cpp:108-148, activation/log_softmax_v2, "
    "aclnn_log_softmax.cpp 9.x:115-159, activation/logsoftmax_v2 8.5.0:115-159; op-plugin Softmax",
)
def _softmax(call: Call) -> Iterable[Kernel]:
    """One SoftmaxV2 or LogSoftmaxV2, in the dtype of the result; a tensor of another one is cast as a whole first."""
    return _reduced(call, "LogSoftmaxV2" if "log" in call.name else "SoftmaxV2", call.result.dtype)


@row(
    "_softmax_backward_data",
    "_log_softmax_backward_data",
    source="ops-nn activation/softmax_grad/op_api/aclnn_softmax_backward.cpp:107-150, activation/log_softmax_grad, "
    "aclnn_logsoftmax_backward.cpp:105-148, the same in 8.5.0 to 9.1.0",
)
def _softmax_backward(call: Call) -> Iterable[Kernel]:
    """One SoftmaxGrad or LogSoftmaxGrad, in the dtype of the gradient, and a Cast where the result has another one."""
    grad, output = call.tensor("grad_output"), call.tensor("output")
    name = "LogSoftmaxGrad" if "log" in call.name else "SoftmaxGrad"
    return written(call, name, nbytes(grad) + nbytes(output), grad.dtype)


@row("cumsum", source="ops-math math/cumsum/op_api/aclnn_cumsum.cpp:277-336, cumsum.cpp 9.1.0:29-49; op-plugin Cumsum")
def _cumsum(call: Call) -> Iterable[Kernel]:
    """One Cumsum in the dtype of the result, to which the tensor is cast first: on the AI CPU for int64."""
    tensor, dtype = call.tensor("self"), call.result.dtype
    on_ai_cpu = dtype not in (torch.float32, *HALF, torch.int32)
    yield from cast(tensor, dtype)
    yield from written(call, "Cumsum", nbytes(tensor, dtype), dtype, on_ai_cpu)


@row("cumprod", source="ops-math math/cumprod/op_host/op_api/aclnn_cumprod.cpp 8.5.0, 9.0.0:90-131 9.1.0:90-138")
def _cumprod(call: Call) -> Iterable[Kernel]:
    """One Cumprod in the dtype of the result, to which the tensor is cast first."""
    return _reduced(call, "Cumprod", call.result.dtype)


@row("topk", source="ops-nn index/gather_elements/op_api/aclnn_topk.cpp 8.5.0:372-507 9.0.0:386-521 9.1.0:643-841")
def _topk(call: Call) -> Iterable[Kernel]:
    """TopK, and a cast of its int32 places to int64. Along the last dimension with a k below 8: TopK of 32 elements,
    TopK of these, and GatherElements of their places. Along another dimension the tensor is transposed before, and the
    results behind."""
    tensor, (values, places) = call.tensor("self"), call.results
    whole, chosen, short = nbytes(tensor), nbytes(values), nbytes(places, torch.int32)
    is_last = call.given["dim"] % max(1, tensor.dim()) == max(1, tensor.dim()) - 1
    if not is_last:
        yield Kernel("Transpose", 2 * whole, workspace=whole)
    if is_last and 0 < call.given["k"] < 8:
        factor = min(32, tensor.shape[-1]) / call.given["k"]
        first, first_places = int(chosen * factor), int(short * factor)
        yield call.main("TopKV2", whole + first + first_places, workspace=first + first_places)
        yield Kernel("TopKV2", first + chosen + short, workspace=short)
        yield Kernel("GatherElements", 3 * short, workspace=short)
    else:
        yield call.main("TopKV2", whole + chosen + short, workspace=short)
    if not is_last:
        yield Kernel("Transpose", 2 * chosen)
        yield Kernel("Transpose", 2 * short, workspace=short)
    yield Kernel("Cast", short + nbytes(places))


@row("sort", "argsort", source="ops-math math/sort/op_api/aclnn_sort.cpp 8.5.0:256-423 9.x:256-426, sort.cpp")
def _sort(call: Call) -> Iterable[Kernel]:
    """Sort, and a cast of its int32 places to int64; on the AI CPU for whole numbers. bfloat16 is cast to float32 and
    back. Along another dimension than the last one the tensor is transposed before, and both results behind."""
    tensor, places = call.tensor("self"), call.results[-1]
    dtype = torch.float32 if tensor.dtype is torch.bfloat16 else tensor.dtype
    whole, short = nbytes(tensor, dtype), nbytes(places, torch.int32)
    is_last = call.given.get("dim", -1) % max(1, tensor.dim()) == max(1, tensor.dim()) - 1
    yield from cast(tensor, dtype)
    if not is_last:
        yield Kernel("Transpose", 2 * whole, workspace=whole)
    on_ai_cpu = dtype not in (torch.float32, torch.float16)
    yield call.main("Sort", 2 * whole + short, workspace=short, on_ai_cpu=on_ai_cpu)
    if not is_last:
        yield Kernel("Transpose", 2 * whole)
        yield Kernel("Transpose", 2 * short, workspace=short)
    if dtype is not tensor.dtype:
        yield Kernel("Cast", whole + nbytes(tensor))
    yield Kernel("Cast", short + nbytes(places))


@row("linalg_vector_norm", source="ops-nn norm/lp_norm_v2, aclnn_linalg_vector_norm.cpp 8.5.0:240-316 9.1.0:244-358")
def _vector_norm(call: Call) -> Iterable[Kernel]:
    """One LpNormV2, in the dtype of the result; a tensor of another one is cast as a whole first."""
    return _reduced(call, "LpNormV2", call.result.dtype)


@row("nll_loss_forward", source="ops-nn loss/nll_loss/op_api/aclnn_nll_loss.cpp:247-353, the same in 8.5.0 to 9.1.0; "
    "op-plugin NLLLoss")  # fmt: skip
def _nll_loss(call: Call) -> Iterable[Kernel]:
    """OnesLike for the weights of the classes that op-plugin makes, and NLLLoss; float16 is cast to float32 first."""
    tensor = call.tensor("self")
    classes = tensor.shape[-1] * tensor.element_size() if call.given.get("weight") is None else 0
    if classes:
        yield Kernel("OnesLike", classes, workspace=classes)
    if tensor.dtype is torch.float16:
        yield from cast(tensor, torch.float32)
    yield call.main("NLLLoss", call.moved + classes)


@row(
    "nll_loss_backward",
    source="ops-nn loss/nll_loss_grad, aclnn_nll_loss_backward.cpp:198-296; op-plugin NLLLossBackward",
)
def _nll_loss_backward(call: Call) -> Iterable[Kernel]:
    """OnesLike for the weights of the classes that op-plugin makes, a cast of the labels to int32, and NLLLossGrad,
    which writes the whole gradient; of float16 in float32, with a cast of it behind."""
    tensor, target, result = call.tensor("self"), call.tensor("target"), call.result
    classes = tensor.shape[-1] * tensor.element_size() if call.given.get("weight") is None else 0
    if classes:
        yield Kernel("OnesLike", classes, workspace=classes)
    yield from cast(target, torch.int32)
    if tensor.dtype is torch.float16:
        yield from cast(tensor, torch.float32)
        yield call.main("NLLLossGrad", nbytes(result, torch.float32), workspace=nbytes(result, torch.float32))
        yield Kernel("Cast", nbytes(result, torch.float32) + nbytes(result))
    else:
        yield call.main("NLLLossGrad", call.moved + classes - nbytes(target) + nbytes(target, torch.int32))


one_kernel(
    "native_layer_norm", kernel="LayerNormV3", source="ops-nn norm/layer_norm_v4, aclnn_layer_norm.cpp 9.1.0:342-492"
)
one_kernel(
    "native_layer_norm_backward",
    kernel="LayerNormGradV3",
    source="ops-nn norm/layer_norm_grad_v3/op_host/op_api/aclnn_layer_norm_backward.cpp 8.5.0:255-435 9.x:256-435",
)
