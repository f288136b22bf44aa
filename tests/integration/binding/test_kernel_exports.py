"""What the integration may read of a loaded kernel: the parts that its package exports, by these names."""

import inspect
from pathlib import Path

import pytest
from kernels import get_local_kernel

ROOT = Path(__file__).resolve().parents[3]
# repository and part -> the functions there, with the arguments that they are called with
EXPORTS = {
    ("SwiGLU", "packing"): {
        "pack": ("gate", "up"),
        "obstacle": ("gate", "up"),
        "separate": ("gate", "up"),
        "projections": ("mlp",),
        "meet": ("mlp",),
    },
    ("SwiGLU", "alignment"): {"unaligned": ("mlp",)},
    ("FusedMoE", "gates"): {"activation_of": ("experts",), "forget": ("experts",)},
    ("FusedMoE", "layout"): {
        "store_transposed": ("weight",),
        "store_contiguous": ("weight",),
        "immovable": ("parameter",),
    },
    ("FusedMoE", "blocks"): {"unfit": ("block",)},
}


@pytest.mark.parametrize(("repository", "part"), EXPORTS, ids=lambda name: name)
def test_a_package_exports_what_the_integration_reads(repository: str, part: str) -> None:
    kernel = get_local_kernel(ROOT / repository)
    assert part in kernel.__all__
    module = getattr(kernel, part)
    assert module.__name__ == f"{kernel.__name__}.{part}"
    for name, arguments in EXPORTS[repository, part].items():
        inspect.signature(getattr(module, name)).bind(*arguments)


def test_the_gate_that_the_integration_asks_for_is_the_one_that_is_exported() -> None:
    kernel = get_local_kernel(ROOT / "FusedMoE")
    assert kernel.gates.Gate is kernel.Gate
