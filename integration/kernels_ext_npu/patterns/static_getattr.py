"""What a module holds under a name. Nobody who only looks computes it: to read a parametrized weight runs its code.

A spectral norm goes a step further whenever its weight is read while it is trained, and an observer counts the reads.
"""

from __future__ import annotations

import inspect
from typing import Any, Final

from torch import nn

COMPUTED: Final = object()  # what a class makes when it is asked, such as a weight that is parametrized


def static_getattr(module: nn.Module, name: str) -> Any:
    """Return what a module holds under a name: None if nothing, and `COMPUTED` where reading it would compute it."""
    of_class = inspect.getattr_static(type(module), name, None)
    if inspect.isdatadescriptor(of_class):
        return COMPUTED
    for place in (module._parameters, module._buffers, module._modules, vars(module)):
        if name in place:
            return place[name]
    return of_class
