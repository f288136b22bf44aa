"""Norms and gated MLPs of other people's code, found by what they compute: no spelling and no name is looked at.

A forward runs on small random numbers on the CPU, on a stand-in that shares nothing with the module but its settings.
Two witnesses have to agree. What it calls: a few operators of torch, without a host read, a branch on a size, a draw of
random numbers or a write. And what comes out: in float64, at magnitudes at which eps and clamps show, what the formula
gives, where straight lines of such operators that agree are the same function; then, of norms, in 16 bits and mixed
dtypes, where their roundings tell layers apart. What it was read from is kept beside it: other settings are another
question.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from kernels_ext_npu.matching.mlps_by_running import find_gated_mlp
from kernels_ext_npu.matching.module_settings import Settings, read_settings
from kernels_ext_npu.matching.norms_by_running import find_norm
from kernels_ext_npu.matching.watched_runs import isolated


class Recognised(NamedTuple):
    """What a module computes."""

    layer: str  # the layer that computes the same
    roles: tuple[tuple[str, Any], ...]  # what the layer reads -> the name of that in the module, or the value of eps
    settings: Settings  # for which that holds


_known: dict[Any, Recognised | None] = {}


def recognise(module: nn.Module) -> Recognised | None:
    """Return what a module computes; None if it is no norm and no gated MLP, or one that no layer computes."""
    settings = read_settings(module)
    if settings is None:
        return None
    shapes = tuple((name, None if p is None else (p.dim(), p.shape[-1:])) for name, p in module._parameters.items())
    key = settings, shapes
    if key not in _known:
        try:
            with isolated():
                found = (find_gated_mlp if module._modules else find_norm)(module)
        except Exception:  # whatever a forward raises that is given what it does not expect
            found = None
        _known[key] = None if found is None else Recognised(*found, settings)
    return _known[key]
