"""What stays after unregister(), on purpose.

Models keep their kernels and the layout of their weights until restore(model), and must then neither lose the wrappers
of other libraries in train() and eval(), nor end in an error when they are saved:

- ``_replace_forward`` of `kernels` puts forwards below wrappers (forwards.py);
- modules that a pickle or a copy is made of hold no forward that is that of their class (forwards.py);
- ``safetensors.torch`` writes experts that were transposed, also when they were copied to the host before; from the
  first such experts on, what saves models makes no second copy of them on the device (saving.py);
- from the first logits on that a head deferred, the steps of optimizers are noted (optimizer_steps.py), so that nobody
  finds the logits of other weights.

What is not on an NPU and does not lie like transposed experts is not touched.
"""

from __future__ import annotations

from kernels_ext_npu.swapping import forwards, saving
from kernels_ext_npu.swapping.patches import Patches

_patches: Patches | None = None
_for_transposed: Patches | None = None


def install() -> None:
    """Make these changes, once a process."""
    global _patches
    if _patches is None:
        _patches = Patches()
        forwards.install(_patches)
        saving.install(_patches)


def install_for_transposed() -> None:
    """Make the changes that models with transposed experts need, once a process."""
    global _for_transposed
    if _for_transposed is None:
        _for_transposed = Patches()
        saving.install_for_transposed(_for_transposed)
