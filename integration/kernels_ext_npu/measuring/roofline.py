"""How long a launch takes at least: what its products need at the peak of a chip, or its bytes at the memory's.

A roofline is an estimate from published peak figures, and a bound from below: no real launch reaches them, and starting
one takes time too. S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model for
multicore architectures", 2009.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SOURCE = (
    "https://github.com/Ascend/msmodeling/blob/1e5a50b1a025a6658a277aa963c87691dc279f4f/tensor_cast/device.py: device "
    "profiles of MindStudio Modeling"
)


@dataclass(frozen=True)
class Soc:
    """A device as torch_npu sees it, of which a 910C has two.

    The peaks of products are in operations a second, by dtype; the bandwidth of its memory is in bytes a second.
    """

    name: str
    profile: str
    bfloat16: float
    float16: float
    float32: float
    bandwidth: float = 1.6 * 2**40


SOCS = {
    "910b": Soc("Ascend 910B, 313 TFLOPS", "ATLAS_800_A2_313T_64G", 294.9e12, 313e12, 83e12),
    "910b-280": Soc("Ascend 910B, 280 TFLOPS", "ATLAS_800_A2_280T_64G", 245.8e12, 280e12, 75e12),
    "910b-376": Soc("Ascend 910B, 376 TFLOPS", "ATLAS_800_A2_376T_64G", 353.9e12, 376e12, 99.5e12),
    "910c": Soc("one die of an Ascend 910C, 752 TFLOPS", "ATLAS_800_A3_752T_128G_DIE", 353.9e12, 376e12, 99.5e12),
    "910c-560": Soc("one die of an Ascend 910C, 560 TFLOPS", "ATLAS_800_A3_560T_128G_DIE", 245.8e12, 280e12, 75e12),
}


def seconds(soc: Soc, flops: float, dtype: torch.dtype | None, moved: int) -> float:
    """Return the least seconds of a launch: of its products in a dtype, and of the bytes that go in and out of it."""
    peak = getattr(soc, str(dtype).rpartition(".")[2], soc.float32)
    return max(moved / soc.bandwidth, flops / peak)
