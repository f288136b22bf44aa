"""What a selective checkpoint may not record.

``torch.utils.checkpoint.create_selective_checkpoint_contexts`` keeps what operators return, and expects the same
operators when the forward runs again. What was written to by then is refused, a write that is left out goes unnoticed,
and what all layers share is there by then and computes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.utils import checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

_SELECTIVE = checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode


def unseen_by_checkpoints() -> AbstractContextManager[None]:
    """Let a selective checkpoint keep nothing of what runs inside: it computes all of it again. Other modes see it."""
    if torch.compiler.is_compiling() or not torch._C._len_torch_dispatch_stack():
        return nullcontext()
    modes = _get_current_dispatch_mode_stack()
    others = [mode for mode in modes if not isinstance(mode, _SELECTIVE)]
    return nullcontext() if len(others) == len(modes) else _replaced(modes, others)


@contextmanager
def _replaced(modes: list, others: list) -> Iterator[None]:
    """Put other modes in the place of all that are active."""
    _replace(modes, others)
    try:
        yield
    finally:
        _replace(others, modes)


def _replace(before: list, after: list) -> None:
    for _ in before:
        _pop_mode()
    for mode in after:
        _push_mode(mode)
