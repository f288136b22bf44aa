"""Convolutions whose windows neither overlap nor leave gaps: patches of a picture, each multiplied by one matrix."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def patch_embedding(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a convolution whose stride is its kernel, as one product: rows are patches, and the weight a matrix.

    That is ``torch.nn.functional.conv2d(x, weight, bias, stride=weight.shape[2:])``, and the same in one and three
    dimensions; what is left at the end of a dimension is cut off, as there. Pixels are copied once, to lie patch by
    patch, and not at all where the picture is one patch, as models give them that cut pictures into patches before.
    Differentiable as often as one likes.

    Args:
        x: ``[B, C, *sizes]`` or ``[C, *sizes]``, of a floating dtype; one to three sizes.
        weight: ``[N, C, *patch]``, of the same dtype.
        bias: ``[N]``, of the same dtype, or None.

    Returns:
        ``[B, N, *(sizes // patch)]``, or without B, contiguous.

    Raises:
        ValueError: x or the bias does not fit to the weight, or x is smaller than a patch.
        RuntimeError: what ``torch.nn.functional.linear`` says of other dtypes or devices.
    """
    patch = weight.shape[2:]
    if not is_cut_into(x, weight):
        raise ValueError(
            f"patch_embedding: x [B, C, *sizes] has no patches of weight [N, C, *patch], got {list(x.shape)} and "
            f"{list(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"patch_embedding: bias must be {list(weight.shape[:1])}, got {list(bias.shape)}")
    if x.dim() == 1 + len(patch):
        return patch_embedding(x[None], weight, bias)[0]
    grid = [size // length for size, length in zip(x.shape[2:], patch)]
    y = F.linear(_rows(x, patch, grid), weight.flatten(1), bias)
    return y.transpose(1, 2).contiguous().unflatten(2, grid)


def is_cut_into(x: Tensor, weight: Tensor) -> bool:
    """Tell whether x has the channels of a weight, and at least one patch."""
    patch = weight.shape[2:]
    sizes = x.shape[-len(patch) :]
    has_dimensions = len(patch) in (1, 2, 3) and x.dim() in (1 + len(patch), 2 + len(patch))
    fits = all(s >= p > 0 for s, p in zip(sizes, patch))
    return has_dimensions and x.shape[-len(patch) - 1] == weight.shape[1] and fits


def _rows(x: Tensor, patch: tuple[int, ...], grid: list[int]) -> Tensor:
    """Return ``[B, patches, C * elements]`` of ``[B, C, *sizes]``: in the order of the grid, and of the weight."""
    if x.shape[2:] == patch:
        return x.flatten(1).unsqueeze(1)
    for dim, (length, number) in enumerate(zip(patch, grid)):
        x = x.narrow(2 + 2 * dim, 0, number * length).unflatten(2 + 2 * dim, (number, length))
    places = range(2, x.dim(), 2)
    return x.permute(0, *places, 1, *(place + 1 for place in places)).flatten(1, len(patch)).flatten(2)
