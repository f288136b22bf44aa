"""What the integration may read of a loaded kernel: the parts that its package exports, by these names."""

from pathlib import Path

import pytest
from kernels import get_local_kernel

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("repository", "part", "names"),
    [
        ("SwiGLU", "packing", {"pack", "obstacle", "separate", "projections", "meet"}),
        ("SwiGLU", "alignment", {"unaligned"}),
        ("FusedMoE", "gates", {"Gate", "activation_of", "forget"}),
        ("FusedMoE", "layout", {"store_transposed", "store_contiguous", "immovable"}),
        ("FusedMoE", "blocks", {"unfit"}),
    ],
)
def test_a_package_exports_what_the_integration_reads(repository: str, part: str, names: set[str]) -> None:
    kernel = get_local_kernel(ROOT / repository)
    assert part in kernel.__all__
    assert names <= vars(getattr(kernel, part)).keys()
