"""Count what the software device launches for attention, and choose what of its launches fake tensors count, too."""

from collections import Counter
from collections.abc import Mapping

import torch
from torch import nn

from tests.support import npu_counts
from tests.support.attention_models import ids

ATTENTION = "npu_fusion_attention_v3"
# What moves and fills, but computes nothing. Fake tensors see operators of torch, the device what these become: copies
# in a conversion, a copy and an operator in place, what is filled in the gradient of a slice.
BOOKKEEPING = {
    *("local_scalar_dense", "to_copy", "copy", "clone", "fill", "zero", "zeros", "new_zeros", "zeros_like", "new_ones"),
    *("full_like", "scalar_tensor", "index_put", "index_put_impl", "slice_backward", "select_backward"),
    *("geglu_grad", "npu_geglu_grad"),  # an operator of our own around that of torch_npu
}
ALSO = {"npu_gather_backward": "scatter_add", "__or__": "bitwise_or", "__and__": "bitwise_and"}


def computing(launches: Mapping[str, int]) -> Counter[str]:
    """Count by operator, whether in place or not."""
    counts: Counter[str] = Counter()
    for name, count in launches.items():
        if name.strip("_") not in BOOKKEEPING:
            counts[ALSO.get(name, name.strip("_"))] += count
    return counts


def attention_launches(model: nn.Module) -> int:
    """Count how often a forward of one of `attention_models` launches the operator of attention."""
    npu_counts.reset()
    with torch.no_grad():
        model(ids(2).to(model.device))
    return npu_counts.read().get(ATTENTION, 0)
