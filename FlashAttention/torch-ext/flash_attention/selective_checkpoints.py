"""What is computed once for all layers, kept out of the sight of selective checkpointing.

Its modes remember the results of the operators in a layer, and count on the same operators when the layer is computed
again. What all layers share is there by then, and computed no second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils import checkpoint
from torch.utils._python_dispatch import _len_torch_dispatch_stack, _pop_mode, _push_mode

_MODES = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)


@contextmanager
def unseen() -> Iterator[None]:
    """Let the modes of selective checkpointing see nothing of what is computed in the context; others see it."""
    if torch.compiler.is_compiling() or not _len_torch_dispatch_stack():
        yield
        return
    modes = [_pop_mode() for _ in range(_len_torch_dispatch_stack())][::-1]
    others = [mode for mode in modes if not isinstance(mode, _MODES)]
    _exchange([], others)
    try:
        yield
    finally:
        _exchange(others, modes)


def _exchange(before: list, after: list) -> None:
    for _ in before:
        _pop_mode()
    for mode in after:
        _push_mode(mode)
