"""What a launch takes at the peaks of a chip: its products at that of the cube units, or its bytes at the memory's.

A roofline compares with published peaks, and is no bound: what stays in the cache moves faster than memory does, so a
launch on less than its 192 MB may take less; others take longer, and starting one takes time too. ``estimate`` says
how much, by what others measured. S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance
model for multicore architectures", 2009.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels_ext_npu.measuring.links import MESH, SWITCH, Links

SOURCE = (
    "https://github.com/Ascend/msmodeling/blob/1e5a50b1a025a6658a277aa963c87691dc279f4f/tensor_cast/device.py: device "
    "profiles of MindStudio Modeling"
)


@dataclass(frozen=True)
class Soc:
    """A device as torch_npu sees it, of which a 910C has two.

    The peaks of products are in operations a second, by dtype; the bandwidth of its memory is in bytes a second. Those
    of bfloat16 are cores x 8,192 operations a cycle x the clock: 24 and 1.8 GHz, 20 and 1.8 GHz, 20 and 1.5 GHz, by
    which a profile is that of a chip.
    """

    name: str
    profile: str
    bfloat16: float
    float16: float
    float32: float
    bandwidth: float = 1.6 * 2**40
    links: Links = MESH

    def peak(self, dtype: torch.dtype | None) -> float:
        """Return the peak of products in a dtype; that of float32 for all that has none."""
        return getattr(self, str(dtype).rpartition(".")[2], self.float32)


SOCS = {
    "910b2": Soc("Ascend 910B2", "ATLAS_800_A2_376T_64G", 353.9e12, 376e12, 99.5e12),
    "910b3": Soc("Ascend 910B3", "ATLAS_800_A2_313T_64G", 294.9e12, 313e12, 83e12),
    "910b4": Soc("Ascend 910B4", "ATLAS_800_A2_280T_64G", 245.8e12, 280e12, 75e12),
    "910c": Soc("one die of an Ascend 910C", "ATLAS_800_A3_752T_128G_DIE", 353.9e12, 376e12, 99.5e12, links=SWITCH),
}


def soc_named(device: str) -> Soc:
    """Return the chip of a device by the name that torch_npu has for it: ``Ascend910B2``, ``Ascend910_9392``."""
    if "910_93" in device:
        return SOCS["910c"]
    return next((soc for name, soc in SOCS.items() if name in device.lower()), SOCS["910b3"])


def seconds(soc: Soc, flops: float, dtype: torch.dtype | None, moved: int) -> float:
    """Return the seconds of a launch at the peaks: of its products in a dtype, or of what goes in and out of it."""
    return max(moved / soc.bandwidth, flops / soc.peak(dtype))
