"""Register a kernel in the place of another, in every release of torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch.library import Library

_ALLOWS = "allow_override" in inspect.signature(Library.impl).parameters


def replace_kernel(library: Library, name: str, kernel: Callable, key: str = "PrivateUse1") -> None:
    """Register a kernel for an operator of the library's namespace, also where there is one."""
    if _ALLOWS:
        library.impl(name, kernel, key, allow_override=True)
        return
    # before 2.8 only torch's own list of what Python registered stands against it
    torch.library._impls.discard(f"{library.ns}/{name}/{key}")
    library.impl(name, kernel, key)
