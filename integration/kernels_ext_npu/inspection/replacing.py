"""What others do, replaced for as long as something is counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kernels_ext_npu.binding.patches import Patches


@contextmanager
def replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    """Replace an attribute of a class or module while the context is open."""
    patches = Patches()
    patches.attribute(owner, name, new)
    try:
        yield
    finally:
        patches.undo()
