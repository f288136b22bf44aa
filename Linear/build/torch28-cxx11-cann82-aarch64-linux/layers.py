"""The layer whose forward `kernels` binds to convolutions of torch that cut pictures into patches."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .patch_convolution import is_cut_into, patch_embedding


class PatchEmbedding(nn.Module):
    """Computes a convolution whose stride is its kernel as one product of rows; any other as torch does.

    `kernels` wants to know these two of a layer, and allows no other members.
    """

    can_torch_compile = True
    has_backward = True

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
