"""The tables from which kernels are taken: transformers' own, and what `kernels` was given of it.

What stands in transformers' table wins over every later registration. It reaches `kernels` when a model is kernelized.
"""

from __future__ import annotations

from typing import Any

from kernels_ext_npu import sources
from kernels_ext_npu.catalogue import LAYERS
from kernels_ext_npu.swapping.state import Registration


def install(registration: Registration) -> None:
    """Put the layers of the repositories that are used into transformers' table, for the NPU.

    Layers of those that are not used lose the kernel that they had for the NPU.
    """
    for layer, repository in LAYERS.items():
        devices = _without_npu(layer)
        if repository in registration.kernels:
            devices["npu"] = sources.layer_source(registration.source, repository, layer)
        _set(registration, layer, devices)


def move_mark(registration: Registration, marked: str, layer: str) -> None:
    """Let other devices keep the kernels that they have for a mark where it becomes another layer's."""
    table = _table()
    devices = table.get(marked, {}) | table[layer]
    if devices != table[layer]:
        _set(registration, layer, devices)


def leave_npu_out(registration: Registration, marked: str, name: str) -> None:
    """Enter another name for a mark, under which all devices but the NPU have the kernels that they have for it."""
    _set(registration, name, _without_npu(marked))


def hand_over() -> None:
    """Give `kernels` what stands in the table."""
    from transformers.integrations import hub_kernels

    hub_kernels.register_kernel_mapping_transformers()


def _table() -> dict[str, dict[str, Any]]:
    from transformers.integrations import hub_kernels

    return hub_kernels.get_kernel_mapping_transformers()


def _without_npu(layer: str) -> dict[str, Any]:
    return {device: kernel for device, kernel in _table().get(layer, {}).items() if device != "npu"}


def _set(registration: Registration, layer: str, devices: dict[str, Any]) -> None:
    """Enter the kernels of a layer into transformers' table, and an empty dictionary for them into that of `kernels`.

    `kernels` never forgets an entry, but fills a dictionary that is there: this one can be taken away.
    """
    from kernels.layer.globals import _KERNEL_MAPPING

    registration.patches.item(_table(), layer, devices)
    registration.patches.item(_KERNEL_MAPPING.get(), layer, {})
