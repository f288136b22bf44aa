"""The layer whose forward `kernels` binds to convolutions of torch that cut pictures into patches."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ._common.modules import Layer as _Layer
from .patch_convolution import is_cut_into, patch_embedding


class PatchEmbedding(_Layer):
    """Computes a convolution whose stride is its kernel as one product of rows; any other as torch does."""

    def forward(self, input: Tensor) -> Tensor:
        conv: Any = self
        if not _takes_patches(conv) or not is_cut_into(input, conv.weight):
            return conv._conv_forward(input, conv.weight, conv.bias)
        return patch_embedding(input, conv.weight, conv.bias)


def _takes_patches(conv: Any) -> bool:
    """Tell whether the windows of a convolution neither overlap nor leave gaps, and hold all channels."""
    is_padded = conv.padding != "valid" and any(conv.padding)
    has_gaps = any(length != 1 for length in conv.dilation)
    return conv.stride == conv.kernel_size and not is_padded and not has_gaps and conv.groups == 1
