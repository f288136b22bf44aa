"""What stays after unregister(), on purpose.

Models keep their kernels and the layout of their weights until restore(model), and must then neither lose the wrappers
of other libraries in train() and eval(), nor end in an error when they are saved:

- ``_replace_forward`` of `kernels` puts forwards below wrappers (forwards.py);
- ``safetensors.torch`` writes experts that were transposed (saving.py).

For what is not on an NPU both do nothing.
"""

from __future__ import annotations

from kernels_ext_npu.swapping import forwards, saving
from kernels_ext_npu.swapping.patches import Patches

_patches: Patches | None = None


def install() -> None:
    """Make these changes, once a process."""
    global _patches
    if _patches is None:
        _patches = Patches()
        forwards.install(_patches)
        saving.install(_patches)
