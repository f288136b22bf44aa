"""Plain linear layers: one product with ordinary tensors and no hooks, so that a kernel may compute it.

Adapters and heads ask it when kernels are swapped in, and again in each call, since a layer is quantised, hooked or
wrapped at any time. Layers of bitsandbytes are none, and are told apart here.
"""

from __future__ import annotations

import sys

from torch import nn
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn.modules import linear

from kernels_ext_npu.binding.loaded_kernels import forward_owner
from kernels_ext_npu.module_state import TORCH_CALL, has_hooks
from kernels_ext_npu.reasons import Reason

COMPRESSED = "compressed"  # the owner of forwards of layers that compressed-tensors keeps in few bits
WRAPPED = Reason("wrapped", "another library has wrapped its forward")
_ONE_LAUNCH = "torch_npu's operator computes it: a kernel of its own would gain less than 1% of a step"
_BITSANDBYTES, _QUANTISED = "bitsandbytes.nn.modules", ("Linear4bit", "LinearNF4", "LinearFP4", "Linear8bitLt")
_NUMBERS = (nn.Parameter, FakeTensor)
# torch's own: somebody may have put another in its place, before or since
_FORWARD = nn.Linear.forward if getattr(nn.Linear.forward, "__globals__", None) is vars(linear) else None


def why_not_plain(layer: nn.Module, is_sharded: bool = False) -> Reason | None:
    """Return why a layer may compute something else than one product with its weight; None if it is plain.

    Args:
        layer: of any class.
        is_sharded: whether DTensors will do, which FSDP2 makes plain while the model is called.
    """
    if type(layer) is not nn.Linear:
        return _other(type(layer))
    if nn.Linear.forward is not _FORWARD or nn.Linear.__call__ is not TORCH_CALL:
        return Reason("replaced", "the forward of all linear layers was replaced")
    if "forward" in vars(layer):
        owner = forward_owner(layer)
        if owner is None:
            return WRAPPED
        if owner == COMPRESSED:
            return Reason("in few bits", "compressed-tensors keeps its weight in few bits")
    if has_hooks(layer):
        return Reason("hooks", "hooks watch its calls")
    weight = layer._parameters.get("weight")
    if weight is None or "bias" not in layer._parameters or hasattr(weight, "_fsdp_flattened"):
        return Reason("flattened", "its weight is a part of another tensor, as under FSDP1")
    for tensor in (weight, layer._parameters["bias"]):
        is_number = type(tensor) in _NUMBERS or (is_sharded and isinstance(tensor, DTensor))
        if tensor is not None and not is_number:
            name = qualified_name(type(tensor))
            return Reason("weight", f"its weight is a {name}: the kernel multiplies with numbers alone")
    return None


def why_kept(cls: type[nn.Linear]) -> Reason:
    """Return why layers of a class that nothing adapts keep their forward."""
    if is_quantised(cls):
        return Reason("quantised", "bitsandbytes computes it, by its operators for the NPU")
    return Reason("plain", _ONE_LAUNCH) if cls.forward is nn.Linear.forward else _other(cls)


def _other(cls: type) -> Reason:
    return Reason("class", f"it is a {qualified_name(cls)}, which may compute something else")


def is_quantised(cls: type) -> bool:
    """Tell whether a class is one of bitsandbytes' in four or eight bits."""
    library = sys.modules.get(_BITSANDBYTES)
    return library is not None and any(cls is getattr(library, name, None) for name in _QUANTISED)


def qualified_name(cls: type) -> str:
    """Return the full name of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"
