"""What stays after unregister(), on purpose.

Models keep their kernels and their packed weights until restore(model), and must then neither lose the wrappers of
other libraries in train() and eval(), nor weights when they are saved:

- ``_replace_forward`` of `kernels` puts forwards below wrappers (forwards.py);
- ``PreTrainedModel.save_pretrained`` and accelerate's ``clean_state_dict_for_safetensors`` write packed weights as two
  tensors (saving.py).

For a model that has no kernels of ours they change nothing, but for one thing: weights that share a storage without
sharing a byte are written each for itself by accelerate too, whoever laid them so.
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
