"""How the weights of experts lie in memory.

The forward multiplies with ``[E, K, N]``, the gradient of its input with the transpose, and one of the two has to be a
transposed view. transformers stores most weights as ``[E, N, K]``: there it is the forward. Views are the default,
since a copy would cost as much memory as the weights. Weights that are read in the forward only, as in inference, can
be stored the other way around in place of a copy.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

_ALONE = 2  # a parameter, and the object that asks


def store_transposed(weight: Tensor) -> None:
    """Move a weight ``[E, A, B]`` to memory in which ``[E, B, A]`` is contiguous. Shape and values stay.

    It needs the memory of a second such weight while it runs. Parameters stay the same objects; state dicts hold the
    values in the shape they had, not contiguous, which ``save_pretrained`` and ``torch.save`` take as it is.

    Args:
        weight: a parameter of any dtype, with values, in a storage of its own.

    Raises:
        ValueError: the weight is not three-dimensional, is no parameter with values, is part of a larger storage, or
            somebody else also holds it, who would not follow.
    """
    _check("store_transposed", weight)
    if not weight.mT.is_contiguous():
        with torch.inference_mode(weight.is_inference()):  # what is made in inference mode cannot be trained
            weight.data = weight.detach().mT.contiguous().mT


def store_contiguous(weight: Tensor) -> None:
    """Undo :func:`store_transposed`: move a weight ``[E, A, B]`` to memory in which it is contiguous.

    Args:
        weight: as there.

    Raises:
        ValueError: as there.
    """
    _check("store_contiguous", weight)
    if not weight.is_contiguous():
        with torch.inference_mode(weight.is_inference()):
            weight.data = weight.detach().contiguous()


def _check(name: str, weight: Tensor) -> None:
    """Raise what the function ``name`` says of a weight that it cannot move."""
    if weight.dim() != 3:
        raise ValueError(f"{name}: a weight of experts is [E, A, B], got {list(weight.shape)}")
    if not isinstance(weight, torch.nn.Parameter) or weight.is_meta:
        raise ValueError(f"{name}: takes parameters with values, got a {type(weight).__name__} on {weight.device.type}")
    reason = immovable(weight)
    if reason is not None:
        raise ValueError(f"{name}: {reason}")


def immovable(parameter: Tensor) -> str | None:
    """Say why a parameter has to stay where it is; None if nothing but itself lies in its storage or refers to it."""
    storage = parameter.untyped_storage()
    if not parameter.numel():
        return "a weight is empty here"
    if storage.nbytes() != parameter.nbytes:
        return "a weight is part of a larger storage"
    if type(parameter) is not FakeTensor and _holders(storage) > _ALONE:
        return "somebody else also holds a weight, such as a state dict or a graph of autograd"
    return None


def _holders(storage: torch.UntypedStorage) -> int:
    """Return how many tensors and objects refer to a storage. In torch 2.6 only torch_npu counts them without CUDA."""
    native = torch._C if hasattr(torch._C, "_storage_Use_Count") else sys.modules["torch_npu"]._C
    return int(native._storage_Use_Count(storage._cdata))
