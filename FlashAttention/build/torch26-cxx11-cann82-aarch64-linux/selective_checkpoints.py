"""Selective activation checkpoints, and what all layers share.

In its modes torch records what each operator of a layer returns, and expects the same operators when the layer is
computed again. What is computed once for all layers is there by then and computes nothing, so they may not record it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils import checkpoint
from torch.utils._python_dispatch import _len_torch_dispatch_stack, _pop_mode, _push_mode

_MODES = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)


@contextmanager
def outside_selective_checkpoint() -> Iterator[None]:
    """Suspend the modes of selective checkpoints, and no others, for what is computed in the context."""
    if torch.compiler.is_compiling() or not _len_torch_dispatch_stack():
        yield
        return
    modes = [_pop_mode() for _ in range(_len_torch_dispatch_stack())][::-1]
    others = [mode for mode in modes if not isinstance(mode, _MODES)]
    _replace_modes([], others)
    try:
        yield
    finally:
        _replace_modes(others, modes)


def _replace_modes(before: list, after: list) -> None:
    for _ in before:
        _pop_mode()
    for mode in after:
        _push_mode(mode)
