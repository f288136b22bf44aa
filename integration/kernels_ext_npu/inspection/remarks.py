"""What there is to say about figures: modules that did not run, where an error arose, what nobody counts."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import nn

from kernels_ext_npu.inspection.counting.counts import Counts
from kernels_ext_npu.inspection.counting.memory import parameter_count
from kernels_ext_npu.measuring.products import is_unknown

_WORTH_IT = 0.01  # the least share of all parameters that is told
_NOT_READ = 0.03  # the least share of all bytes


@contextmanager
def idle(model: nn.Module, remarks: list[str]) -> Iterator[None]:
    """Remark the larger parts of a model that were not called meanwhile."""
    called: set[nn.Module] = set()
    original = nn.Module._call_impl

    def noted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        called.add(module)
        return original(module, *args, **kwargs)

    # no hook, nor another __call__: kernels step aside for those that watch all modules
    with patch.object(nn.Module, "_call_impl", noted):
        yield
    if model in called:
        remarks += [f"not counted, since these inputs do not reach it: {part}" for part in _idle(model, called)]


def culprit(model: nn.Module, error: BaseException) -> str:
    """Find the path of the innermost module of a model in whose code an error arose."""
    paths = {module: path for path, module in model.named_modules()}
    frames = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    found = [paths[owner] for owner in frames if isinstance(owner, nn.Module) and owner in paths]
    return (found[-1] if found else "") or type(model).__name__


def unknown_products(operators: Iterable[str]) -> list[str]:
    """Say of which operators estimates count the bytes alone, though they multiply."""
    names = sorted(filter(is_unknown, operators))
    said = f"estimates count only the bytes of {', '.join(names)}: how much they multiply is not known"
    return [said] if names else []


def not_read(counted: Iterable[Counts]) -> list[str]:
    """Say of which operators nobody has read what they do inside, where these are more than a few of the bytes."""
    names = {
        name
        for counts in counted
        if counts.not_read.total() > _NOT_READ * counts.bytes.total()
        for name in counts.not_read
    }
    said = f"of {', '.join(sorted(names))} the bytes that go in and out count, and nothing inside: nobody read that yet"
    return [said] if names else []


def _idle(model: nn.Module, called: set[nn.Module]) -> Iterator[str]:
    """Describe the outermost modules of which no part was called, nor of one in another layer."""
    whole = parameter_count(model)
    reached = {_anywhere(path) for path, module in model.named_modules() if module in called}
    waiting = list(model.named_children())
    for path, module in waiting:  # grows while it runs
        size = parameter_count(module)
        if size < _WORTH_IT * whole:
            continue
        parts = [_anywhere(f"{path}.{name}".rstrip(".")) for name, _ in module.named_modules()]
        if reached.isdisjoint(parts):
            yield f"{_anywhere(path)}, {size / 1e9:.2g} of {whole / 1e9:.2g} billion parameters"
        else:
            waiting += [(f"{path}.{name}", child) for name, child in module.named_children()]


def _anywhere(path: str) -> str:
    return re.sub(r"\b\d+\b", "*", path)
