"""A probe of whether transformers and kernels can be imported, where the device could not be tried."""

from __future__ import annotations

import os

from kernels_ext_npu.doctor.probe import step

KERNELS, TRANSFORMERS = "import kernels", "import transformers"


def probe() -> None:
    """Import kernels and transformers."""
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    step(KERNELS)
    import kernels  # noqa: F401

    step(TRANSFORMERS)
    import transformers  # noqa: F401  its parts ask for torch_npu, which is told by itself
