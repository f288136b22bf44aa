"""Lets experts be saved that transpose_experts() has laid the other way around.

A file of safetensors holds contiguous tensors only: its functions refuse all others, and other libraries make all
tensors contiguous before they write, where these lie, so that experts would be on the device twice. All of them get a
copy of such weights on the host instead, from the first transposed experts on, also after unregister(): models keep the
layout of their weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

_DUPLICATES = "_remove_duplicate_names"  # what save_model() calls with its state dict, before it makes that contiguous
_GIVEN_TENSORS = (  # functions of this and of former releases, by which all passes that is saved
    ("safetensors.torch", "_flatten_as_ptr"),
    ("safetensors.torch", "_flatten"),
    ("safetensors.torch", _DUPLICATES),
    ("transformers.modeling_utils", "remove_tied_weights_from_state_dict"),
    ("huggingface_hub.serialization._torch", "_clean_state_dict_for_safetensors"),
    ("accelerate.utils.other", "clean_state_dict_for_safetensors"),
    ("accelerate.accelerator", "clean_state_dict_for_safetensors"),
)


@functools.cache
def install() -> None:
    """Make these changes, once a process. What is not installed is passed by."""
    for module, name in _GIVEN_TENSORS:
        try:
            owner = import_module(module)
        except ImportError:
            continue
        if name in vars(owner):
            setattr(owner, name, _given_on_the_host(vars(owner)[name], in_place=name == _DUPLICATES))


def _given_on_the_host(original: Callable, in_place: bool) -> Callable:
    """Wrap a function that gets tensors to save first; in place if its caller goes on with the dictionary."""

    @functools.wraps(original)
    def call(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensors, dict):
            copies = _copies_on_the_host(tensors)
            if in_place:
                tensors.update(copies)
            elif copies:
                tensors = tensors | copies
        return original(tensors, *args, **kwargs)

    return call


def _copies_on_the_host(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """Copy what is transposed. What had two names has them after that, so that savers drop or refuse it as ever."""
    copies: dict[tuple, Tensor] = {}
    places = {name: (t.device, t.data_ptr(), t.shape) for name, t in tensors.items() if _is_transposed(t)}
    return {name: copies.setdefault(place, tensors[name].cpu().contiguous()) for name, place in places.items()}


def _is_transposed(tensor: Any) -> bool:
    """Tell whether a tensor lies as the weights of experts do that were transposed: ``[E, A, B]`` as ``[E, B, A]``."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided or tensor.dim() != 3:
        return False
    return tensor.device.type in ("npu", "cpu") and not tensor.is_contiguous() and tensor.mT.is_contiguous()
