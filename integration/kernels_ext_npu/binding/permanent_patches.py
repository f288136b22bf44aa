"""What stays after unregister(), on purpose.

Models keep their kernels until restore(model), and must then not lose the wrappers of other libraries in train() and
eval():

- ``_replace_forward`` of `kernels` puts forwards below wrappers (forwards.py);
- modules that a pickle or a copy is made of hold no forward that is that of their class (forwards.py);
- ``safetensors.torch`` and what saves models with it copy experts to the host that were transposed, once there are some
  (experts/saving.py);
- from the first logits on that a head deferred, the steps of optimizers are noted (optimizer_steps.py), so that nobody
  finds the logits of other weights.

What is not on an NPU and does not lie like transposed experts is not touched.
"""

from __future__ import annotations

from kernels_ext_npu.binding import forward_binding
from kernels_ext_npu.binding.patches import Patches

_patches: Patches | None = None


def install() -> None:
    """Make these changes, once a process."""
    global _patches
    if _patches is None:
        _patches = Patches()
        forward_binding.install(_patches)
