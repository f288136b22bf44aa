"""The tables from which kernels are taken: transformers' own, and what `kernels` was given of it.

What stands in transformers' table wins over every later registration: it is given again when a model is kernelized.
"""

from __future__ import annotations

from typing import Any

import kernels

from kernels_ext_npu.binding.registration import Registration
from kernels_ext_npu.catalogue import LAYERS
from kernels_ext_npu.distribution import kernels_internals, sources

Table = dict[str, dict[str, Any]]


def install(registration: Registration) -> None:
    """Put the layers of the repositories that are used into transformers' table, for the NPU.

    Layers of those that are not used lose the kernel that they had for the NPU.
    """
    table, used = _table(), {layer: repo for layer, repo in LAYERS.items() if repo in registration.kernels}
    ours = sources.layer_sources(registration.source, used)
    devices = {layer: {k: kernel for k, kernel in table.get(layer, {}).items() if k != "npu"} for layer in LAYERS}
    for layer, source in ours.items():
        devices[layer]["npu"] = source
    _set(registration, devices)


def marked(cls: type) -> str | None:
    """Return the layer that a class is marked for."""
    return getattr(cls, "kernel_layer_name", None)


def mark(registration: Registration, cls: type, layer: str) -> None:
    """Mark a class for a layer. Other devices keep the kernels that they have for the mark that it had."""
    table, before = _table(), marked(cls)
    devices = table.get(before or layer, {}) | table[layer]
    if devices != table[layer]:
        _set(registration, {layer: devices})
        kernels.register_kernel_mapping({layer: devices})
    registration.patches.attribute(cls, "kernel_layer_name", layer)


def _table() -> Table:
    from transformers.integrations import hub_kernels

    return hub_kernels.get_kernel_mapping_transformers()


def _set(registration: Registration, layers: Table) -> None:
    """Enter the kernels of layers into transformers' table, and empty dictionaries for them into that of `kernels`.

    `kernels` never forgets an entry, but fills a dictionary that is there: these can be taken away.
    """
    registration.patches.items(_table(), layers)
    if (given := kernels_internals.table()) is not None:
        registration.patches.items(given, {layer: {} for layer in layers})
