"""What runs for convolutions, whose operators read layouts of their own."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor

from kernels_ext_npu.measuring.inside.table import Call, Kernel, nbytes, row

_CHANNELS = 16  # that the layouts of convolutions keep together


@row(
    "convolution",
    source="ops-nn conv/convolution_forward/op_host/op_api/aclnn_convolution.cpp 9.1.0:2414-2600,4516-4680; of "
    "8.5.0:2236-2386 and 9.0.0:2245-2395 the calls of TransData alone; op-plugin Convolution",
)
def _convolution(call: Call) -> Iterable[Kernel]:
    """TransData of the input and of the filters into the layouts that Conv2D reads, with channels in groups of 16, the
    Conv2D, and TransData of what it gives. Filters of one channel each take 16 times their bytes there."""
    tensor, weight, result = call.tensor("input"), call.tensor("weight"), call.result
    read, written, filters = _padded(tensor), _padded(result), _filters(weight)
    yield Kernel("TransData", nbytes(tensor) + read, workspace=read)
    yield Kernel("TransData", nbytes(weight) + filters, workspace=filters)
    yield call.main("Conv2D", read + filters + written, workspace=written)
    yield Kernel("TransData", written + nbytes(result))


@row(
    "convolution_backward",
    source="ops-nn conv/convolution_backward/op_api/aclnn_convolution_backward.cpp, `InputPreProcess`, "
    "`OutputPostProcess`, `CalculateConv2DBackward` 9.1.0:561-680,1310-1420; of 8.5.0:305-371,1048 and "
    "9.0.0:309-376,1078 that these are there and call TransData; op-plugin ConvolutionBackward was not read",
)
def _convolution_backward(call: Call) -> Iterable[Kernel]:
    """ReduceSum for the bias. TransData of the result's gradient, of the input and of the filters, whichever gradients
    are wanted; Conv2DBackpropInput and TransData of what it gives; Conv2DBackpropFilter, which writes float32,
    TransData of that, and for 16 bits a Cast, with several groups before it."""
    grad, tensor, weight = (call.tensor(name) for name in ("grad_output", "input", "weight"))
    for_input, for_weight, for_bias = call.given["output_mask"]
    if for_bias:
        bias = grad.shape[1] * grad.element_size()
        yield Kernel("ReduceSum", nbytes(grad) + bias, is_main=not (for_input or for_weight))
    if not (for_input or for_weight):
        return
    given, read, filters = _padded(grad), _padded(tensor), _filters(weight)
    for whole, laid_out in ((grad, given), (tensor, read), (weight, filters)):
        yield Kernel("TransData", nbytes(whole) + laid_out, workspace=laid_out)
    if for_input:
        yield call.main("Conv2DBackpropInput", given + filters + read, workspace=read)
        yield Kernel("TransData", read + nbytes(tensor))
    if for_weight:
        summed = _filters(weight, torch.float32)
        yield call.main("Conv2DBackpropFilter", given + read + summed, workspace=summed)
        dtype = weight.dtype if call.given["groups"] > 1 else torch.float32
        if dtype is not torch.float32:
            yield Kernel("Cast", summed + _filters(weight), workspace=_filters(weight))
        back = nbytes(weight, dtype)
        yield Kernel("TransData", _filters(weight, dtype) + back, workspace=back * (dtype is not weight.dtype))
        if dtype is not weight.dtype:
            yield Kernel("Cast", back + nbytes(weight))


def _filters(weight: Tensor, dtype: torch.dtype | None = None) -> int:
    """Return the bytes of filters with both numbers of channels rounded up."""
    channels = _rounded(weight.shape[0]) * _rounded(weight.shape[1])
    return channels * prod(weight.shape[2:]) * (dtype or weight.dtype).itemsize


def _padded(tensor: Tensor) -> int:
    """Return the bytes of a tensor whose channels, along dimension 1, are rounded up."""
    return nbytes(tensor) // max(1, tensor.shape[1]) * _rounded(tensor.shape[1])


def _rounded(channels: int) -> int:
    return -(-channels // _CHANNELS) * _CHANNELS
