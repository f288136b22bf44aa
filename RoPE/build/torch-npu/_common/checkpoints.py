"""What a selective checkpoint may not look at: operators that write to what others have returned.

``torch.utils.checkpoint.create_selective_checkpoint_contexts`` keeps what operators return, and gives it back in their
place when the forward runs again. What was written to by then is refused, and a write that is left out goes unnoticed.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.utils import checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily

_SELECTIVE = checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode


def unseen_by_checkpoints() -> AbstractContextManager[object]:
    """Let a selective checkpoint keep nothing of what runs inside: it computes all of it again."""
    if torch.compiler.is_compiling() or not isinstance(_get_current_dispatch_mode(), _SELECTIVE):
        return nullcontext()
    return _pop_mode_temporarily()
