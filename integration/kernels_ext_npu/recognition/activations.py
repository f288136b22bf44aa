"""Activations that are found by running them, of those that are written out in several operators."""

from __future__ import annotations

from itertools import product

import torch
from torch import nn
from torch.nn import functional as F

from kernels_ext_npu.recognition.computed import Computed
from kernels_ext_npu.recognition.module_settings import names_read
from kernels_ext_npu.recognition.watched_runs import (
    CLAMPS,
    MAGNITUDES,
    ROUNDINGS,
    Watched,
    are_same,
    check_sizes,
    is_close,
    run,
    takes,
)

_WRITTEN_OUT = {"tanh", "sigmoid"}  # GELU in one operator has a kernel of its own


def find_activation(module: nn.Module) -> Computed | None:
    """Return the layer of an activation."""
    names = names_read(type(module), type(module).forward)  # type: ignore[arg-type]
    if module._parameters or _WRITTEN_OUT.isdisjoint(names) or not takes(module, 1):
        return None  # a module may be there for what else it does, and is not run for a try
    x = torch.randn(2, 3, 64, dtype=torch.float64)
    layers = {"NewGELU": lambda x: F.gelu(x, approximate="tanh"), "QuickGELU": lambda x: x * torch.sigmoid(1.702 * x)}
    watch = Watched(CLAMPS)
    probes = [x * magnitude for magnitude in MAGNITUDES] + [x[0], x[None]]
    for probe, training, with_grad in product(probes, (False, True), (False, True)):
        given = probe.clone().requires_grad_(with_grad)
        with torch.set_grad_enabled(with_grad):
            found = run(module, given, training=training, watch=watch)
            layers = {name: each for name, each in layers.items() if are_same(found, each(given), [given])}
    for dtype in (torch.bfloat16, torch.float16):
        given = x.to(dtype)
        found, limit = run(module, given), ROUNDINGS * torch.finfo(dtype).eps
        layers = {name: each for name, each in layers.items() if is_close(found, each(given.double()), limit)}
        if found.dtype is not dtype:
            return None
    if not layers or not CLAMPS.isdisjoint(watch.called):
        return None
    check_sizes(lambda given: run(module, given), 5, 7, 64)
    (layer,) = layers
    is_fast = layer == "NewGELU" and "pow" not in watch.called  # which autocast takes to float32
    return Computed("FastGELU" if is_fast else layer, returned=watch.returned)
