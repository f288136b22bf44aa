"""Indexers that choose keys in parts, and modules that hand on what was chosen in place of a mask of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from kernels_ext_npu.binding import registration
from kernels_ext_npu.binding.devices import is_elsewhere
from kernels_ext_npu.binding.patches import Patches
from kernels_ext_npu.matching.indexer_scan import chooser, hands_on_indices
from kernels_ext_npu.swaps import refusals
from kernels_ext_npu.swaps.attention import serving
from kernels_ext_npu.swaps.named_implementation import NPU_FLASH_ATTENTION


def answer(classes: Iterable[type], patches: Patches) -> None:
    """Let indexers of some classes, and modules that call one, ask here first."""
    for cls in {base for each in classes for base in each.__mro__ if "forward" in vars(base)}:
        make, handing_on = chooser(cls), hands_on_indices(cls)
        if make is not None:
            ours = functools.partial(_choose, make(_top_k_keys))
        elif handing_on is not None:
            ours = functools.partial(_hand_on, handing_on)
        else:
            continue
        if not patches.knows(cls, "forward"):
            patches.method(cls, "forward", ours, NPU_FLASH_ATTENTION.is_registered)


def is_indexer(module: nn.Module) -> bool:
    """Tell whether a module chooses keys in a way that is known."""
    return chooser(type(module)) is not None


def refusal(module: nn.Module) -> str | None:
    """Return why an indexer computes all of its scores at once; None where it does not."""
    config: Any = module.config
    if serving.PLAIN in vars(module):
        return refusals.NOT_ASKED_FOR
    if is_elsewhere(module):
        return refusals.elsewhere(module)
    return None if _is_ours(config) else f"the attention implementation {config._attn_implementation} was asked for"


def hands_on(module: nn.Module) -> bool:
    """Tell whether a module hands on indices, with what it has for an indexer: one that is known, or none."""
    known = [base for base in type(module).__mro__ if "forward" in vars(base)][:1]
    if not known or hands_on_indices(known[0]) is None or not _stands_for(module):
        return False
    indexer = module._modules.get("indexer")
    return indexer is None or (is_indexer(indexer) and _stands_for(indexer))


def among(mask: Tensor, indices: Tensor) -> Tensor:
    """Return a mask, ``[B, 1, S_q, S_k]``, in which a query sees chosen keys alone."""
    chosen = torch.zeros(len(indices), *mask.shape[-2:], dtype=torch.uint8, device=mask.device)
    chosen = chosen.scatter_(-1, indices.long(), 1).bool().unsqueeze(1)
    return mask & chosen if mask.dtype == torch.bool else mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)


def _choose(ours: FunctionType, original: Callable, self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    given = args[0] if args else kwargs.get("hidden_states")
    if not (isinstance(given, Tensor) and given.device.type == "npu" and _stands_for(self)):
        return original(self, *args, **kwargs)
    with torch.no_grad():
        return ours(self, *args, **kwargs)


def _hand_on(ours: FunctionType, original: Callable, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    given = args[0] if args else kwargs.get("hidden_states")
    is_looked_at = kwargs.get("output_attentions", getattr(self.config, "output_attentions", False))
    is_ours = isinstance(given, Tensor) and given.device.type == "npu" and hands_on(self)
    return (ours if is_ours and not is_looked_at else original)(self, *args, **kwargs)


def _stands_for(module: nn.Module) -> bool:
    """Tell whether the kernel computes what a module names; a graph of torch.compile keeps masks."""
    return (
        _is_ours(module.config)
        and serving.PLAIN not in vars(module)
        and not torch.compiler.is_compiling()
        and registration.try_package(NPU_FLASH_ATTENTION.repository) is not None
    )


def _is_ours(config: Any) -> bool:
    is_standing_in = serving.stands_for(config) and serving.stranger(config) is None
    return is_standing_in or NPU_FLASH_ATTENTION.is_named_by(config)


def _top_k_keys(*args: Any) -> Tensor:
    return registration.package(NPU_FLASH_ATTENTION.repository).top_k_keys(*args)
