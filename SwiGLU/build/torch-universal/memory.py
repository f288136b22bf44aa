"""Where parameters lie: whether they can be moved, and neighbouring storages for two of them."""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

_OWN_HOLDERS = 2  # of a storage: the parameter, and the object that asks


def immovable(parameter: Tensor) -> str | None:
    """Say why a parameter has to stay where it is; None if nothing but itself lies in its storage or refers to it."""
    storage = parameter.untyped_storage()
    if not parameter.numel():
        return "a weight is empty here"
    if storage.nbytes() != parameter.nbytes:
        return "a weight is part of a larger storage"
    if type(parameter) is not FakeTensor and _holders(storage) > _OWN_HOLDERS:
        return "somebody else also holds a weight, such as a state dict or a graph of autograd"
    return None


def _holders(storage: torch.UntypedStorage) -> int:
    """Return how many tensors and objects refer to a storage. In torch 2.6 only torch_npu counts them without CUDA."""
    native = torch._C if hasattr(torch._C, "_storage_Use_Count") else sys.modules["torch_npu"]._C
    return int(native._storage_Use_Count(storage._cdata))


def adjacent_halves(both: Tensor) -> tuple[Tensor, Tensor]:
    """Return the halves of a new tensor ``[2·I, ...]`` as tensors with storages of their own in its memory.

    The memory is freed when both are gone. Releases of torch_npu without DLPack, by their wheels 2.6.0, 2.7.1 and 2.8.0
    among them, give storages that cannot be resized.
    """
    first, second = both.chunk(2)
    return (first, second) if type(both) is FakeTensor else (_with_own_storage(first), _with_own_storage(second))


def _with_own_storage(part: Tensor) -> Tensor:
    """Return a tensor in the memory of a part of another, with a storage that keeps that other one's alive."""
    native = sys.modules["torch_npu"]._C  # whoever has a tensor on the NPU has imported it
    if hasattr(native, "_npu_from_dlpack"):
        storage = native._npu_from_dlpack(native._npu_to_dlpack(part)).untyped_storage()
    else:
        storage = native._construct_storage_from_data_pointer(part.data_ptr(), part.device, part.nbytes)
        storage._memory = part.untyped_storage()  # an attribute lives as long as the storage, whoever holds it
    form = {"dtype": part.dtype, "size": tuple(part.shape), "stride": part.stride(), "storage_offset": 0}
    # which tells the storage how it is laid out, too
    return native._construct_NPU_Tensor_From_Storage_And_Metadata(form, storage)
