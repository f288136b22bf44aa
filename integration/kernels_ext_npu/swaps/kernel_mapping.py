"""The tables from which kernels are taken: transformers' own, and what `kernels` was given of it.

What stands in transformers' table wins over every later registration: it is given again when a model is kernelized.
`kernels` never forgets an entry, but fills a dictionary that is there: these can be taken away.
"""

from __future__ import annotations

from transformers.integrations import hub_kernels

from kernels_ext_npu.binding.registration import Registration
from kernels_ext_npu.catalogue import LAYERS
from kernels_ext_npu.distribution import kernels_internals, sources


def install(registration: Registration) -> None:
    """Put the layers of the repositories that are used into transformers' table, for the NPU.

    Layers of those that are not used lose the kernel that they had for the NPU.
    """
    table = hub_kernels.get_kernel_mapping_transformers()
    devices = {layer: {k: kernel for k, kernel in table.get(layer, {}).items() if k != "npu"} for layer in LAYERS}
    used = {layer: repository for layer, repository in LAYERS.items() if repository in registration.kernels}
    for layer, source in sources.layer_sources(registration.source, used).items():
        devices[layer]["npu"] = source
    registration.patches.items(table, devices)
    if (given := kernels_internals.table()) is not None:
        registration.patches.items(given, {layer: {} for layer in LAYERS})
