"""Tensors that lie one behind the other in memory, and are used as one without a copy.

Each has a storage of its own: who saves, copies, resizes or frees one knows nothing of the other. What says that they
are neighbours are their addresses. Fake tensors have none; of those two views of one storage are neighbours.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch._subclasses import FakeTensor


def are_neighbours(a: Tensor, b: Tensor) -> bool:
    """Tell whether ``b`` lies directly behind ``a``, both contiguous. They are on one NPU, and of one dtype."""
    if type(a) is FakeTensor:
        behind = a.storage_offset() + a.numel() == b.storage_offset()
        return behind and a.untyped_storage()._cdata == b.untyped_storage()._cdata
    return a.data_ptr() + a.nbytes == b.data_ptr() and a.is_contiguous() and b.is_contiguous()


def with_neighbour(a: Tensor) -> Tensor:
    """View a tensor ``[A, ...]`` and its neighbour of the same shape as one tensor ``[2·A, ...]``, for a launch.

    The view keeps neither of them alive, nor does it know what was changed in them since: who keeps a tensor for later,
    as autograd does, keeps the two.
    """
    rows, *others = a.shape
    size = (2 * rows, *others)
    if type(a) is FakeTensor:
        return a.as_strided(size, a.stride(), a.storage_offset())
    native = sys.modules["torch_npu"]._C  # whoever has a tensor on the NPU has imported it
    storage = native._construct_storage_from_data_pointer(a.data_ptr(), a.device, 2 * a.nbytes)
    form = {"dtype": a.dtype, "size": size, "stride": a.stride(), "storage_offset": 0}
    return native._construct_NPU_Tensor_From_Storage_And_Metadata(form, storage)


def joined(a: Tensor, b: Tensor) -> Tensor:
    """Return two tensors of one shape that were neighbours in a forward as one, with a copy if they are none any more.

    A tensor that was saved for the backward is the parameter as it is then, wherever it has been moved since.
    """
    return with_neighbour(a) if are_neighbours(a, b) else torch.cat((a, b))
