"""Lets experts be saved that transpose_experts() has laid the other way around.

A file of safetensors holds contiguous tensors only, and its functions refuse all others. What is written here is a copy
on the host of such weights alone. What another library copies to the host before it writes lies there as it lay on the
NPU.

Other libraries make all tensors contiguous before they write, where these lie: experts would be on the device twice.
They get the copy on the host.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kernels_ext_npu.swapping.patches import Patches

_WRITERS = ("_flatten_as_ptr", "_flatten")  # of this and of former releases: all that safetensors writes passes them
_COPYING = (  # they take a state dict, and they or who calls them make what they return contiguous
    ("transformers.modeling_utils", "remove_tied_weights_from_state_dict"),
    ("huggingface_hub.serialization._torch", "_clean_state_dict_for_safetensors"),
    ("accelerate.utils.other", "clean_state_dict_for_safetensors"),
    ("accelerate.accelerator", "clean_state_dict_for_safetensors"),
)


def install(patches: Patches) -> None:
    """Let safetensors copy what is transposed when it writes."""
    import safetensors.torch

    for name in _WRITERS:
        _wrap(patches, safetensors.torch, name, _given_on_the_host)


def install_for_transposed(patches: Patches) -> None:
    """Let nobody make what is transposed contiguous on the device to save it. What is not installed is passed by."""
    import safetensors.torch

    _wrap(patches, safetensors.torch, "_remove_duplicate_names", _left_on_the_host)
    for module, name in _COPYING:
        try:
            owner = importlib.import_module(module)
        except ImportError:
            continue
        _wrap(patches, owner, name, _given_on_the_host)


def _wrap(patches: Patches, owner: Any, name: str, wrap: Callable[[Callable], Callable]) -> None:
    """Wrap a function of a module, if this release has it."""
    original = vars(owner).get(name)
    if original is not None:
        patches.attribute(owner, name, wrap(original))


def _given_on_the_host(original: Callable) -> Callable:
    """Wrap a function that gets tensors to save first."""

    @functools.wraps(original)
    def call(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        return original(_on_the_host(tensors) if isinstance(tensors, dict) else tensors, *args, **kwargs)

    return call


def _left_on_the_host(original: Callable) -> Callable:
    """Wrap what safetensors looks for tensors of several names with, in a state dict that save_model() saves then.

    It cannot look at what is not contiguous. load_model() passes more than the state dict, and takes names only.
    """

    @functools.wraps(original)
    def call(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        duplicates = original({name: t.mT if _is_transposed(t) else t for name, t in tensors.items()}, *args, **kwargs)
        if not args and not kwargs:
            tensors.update(_on_the_host(tensors))
        return duplicates

    return call


def _on_the_host(tensors: dict[str, Any]) -> dict[str, Any]:
    """Copy what is transposed. What had two names has them after that, so that savers drop or refuse it as ever."""
    copies: dict[tuple, Tensor] = {}
    changed = {}
    for name, tensor in tensors.items():
        if _is_transposed(tensor):
            place = (tensor.device, tensor.data_ptr(), tensor.shape)
            if place not in copies:
                copies[place] = tensor.cpu().contiguous()
            changed[name] = copies[place]
    return tensors | changed if changed else tensors


def _is_transposed(tensor: Any) -> bool:
    """Tell whether a tensor lies as the weights of experts do that were transposed: ``[E, A, B]`` as ``[E, B, A]``."""
    return _is_plain(tensor) and tensor.dim() == 3 and not tensor.is_contiguous() and tensor.mT.is_contiguous()


def _is_plain(tensor: Any) -> bool:
    """Tell whether it is a tensor in memory of its own, on the NPU or the host."""
    is_one = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return is_one and tensor.device.type in ("npu", "cpu")
