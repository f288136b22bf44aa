"""Whether two ways of computing a call agree: both are held against the original in float32.

bfloat16 and float16 round every result, and whoever has fewer or other steps in between rounds at other places: two
correct results differ, and neither is the truth. Float32 has 16 or 13 bits more, and is that for this purpose. So an
output may be twice as far from it as the original's is, and a gradient three times, since fused attention computes that
of its softmax from its rounded output: as much as the tests of Dao-AILab/flash-attention (tests/test_flash_attn.py)
allow. Where the original happens to be nearer, it is as far as one rounding can bring it. A wrong formula is off by a
hundred times as much.
"""

from __future__ import annotations

import torch

from kernels_ext_npu.measuring.distance import DisagreementError, Distance

FACTOR, FACTOR_OF_GRADIENT = 2, 3
# of the largest single difference, which is a matter of luck
FACTOR_OF_LARGEST = 4
# with fewer values than this the norm is a matter of luck too, and the original's worst tensor is the measure
FEW = 64
RULE = (
    "Outputs and gradients are compared with the original in float32, by the norm of the difference and by the largest "
    f"single one: {FACTOR} and {FACTOR_OF_LARGEST} times what the original differs are allowed, or one rounding of the "
    f"dtype where that is more; the norm of a gradient may differ by {FACTOR_OF_GRADIENT} times, that of a bias by "
    f"{FACTOR_OF_LARGEST}, and a tensor of fewer than {FEW} values as the original's worst does. What differs by more "
    "is refused."
)

Distances = dict[str, Distance]


def check(found: Distances, original: Distances, dtype: torch.dtype) -> None:
    """Raise DisagreementError if a result is further away than it may be."""
    rounding = torch.finfo(dtype).eps / 2
    for name, distance in found.items():
        measures = original.values() if distance.values < FEW else [original[name]]
        factor_of_norm = FACTOR_OF_GRADIENT if name.startswith("gradient") else FACTOR
        if name.endswith("bias"):  # a sum over all tokens, of a key's nearly 0: what remains are roundings of its terms
            factor_of_norm = FACTOR_OF_LARGEST
        for what, factor in ("norm", factor_of_norm), ("largest", FACTOR_OF_LARGEST):
            value = getattr(distance, what)
            allowed = max(rounding, *(factor * getattr(measure, what) for measure in measures))
            if not value <= allowed:  # NaN is not
                where = "" if what == "norm" else " in its largest difference"
                raise DisagreementError(f"{name} is {value:.1e} away from float32{where}, and {allowed:.1e} is allowed")
