"""Files of transformers that go another way for every implementation with "flash" in its name.

What they mean is flash-attn, which takes no masks: those of SAM 2 leave masks that are added to scores to torch, which
drops them on an NPU; ESM C refuses chains, HRM prefixes, and masking_utils chunks. Ours computes all of these, and is
to them as any other implementation. Files that give a flash attention the lengths of sequences stay as they are.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from transformers import PreTrainedModel, masking_utils
from transformers.utils.generic import is_flash_attention_requested

from kernels_ext_npu.swapping import attention_choice, state
from kernels_ext_npu.swapping.patches import Patches

_ASKED = "is_flash_attention_requested"
_LENGTHS = "cu_seq_lens_q="
_MODELS = "transformers.models."


def install(patches: Patches) -> None:
    """Let files of models that are loaded, and others when a model is made of them, ask what ours needs."""
    patches.attribute(masking_utils, _ASKED, _is_other_flash_attention)
    for name in list(sys.modules):
        if name.startswith(_MODELS):
            _adapt(name, patches)
    patches.method(PreTrainedModel, "__init__", _adapting, lambda: state.uses(attention_choice.REPOSITORY))


def _adapting(original: Callable, self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
    """Make a model, whose first act is to check the name of its implementation."""
    assert state.current is not None
    for name in {cls.__module__ for cls in type(self).__mro__}:
        if name.startswith(_MODELS) or not name.startswith("transformers."):  # generation is to know ours as flash
            _adapt(name, state.current.patches)
    original(self, *args, **kwargs)


def _adapt(name: str, patches: Patches) -> None:
    file = sys.modules.get(name)
    if file is not None and vars(file).get(_ASKED) is is_flash_attention_requested and not _gives_lengths(file):
        patches.attribute(file, _ASKED, _is_other_flash_attention)


def _gives_lengths(file: ModuleType) -> bool:
    try:
        return _LENGTHS in inspect.getsource(file)
    except OSError:
        return True


def _is_other_flash_attention(
    config: Any = None, requested_attention_implementation: str | None = None, version: Any = None
) -> bool:
    """Tell whether an implementation is a flash attention that is not ours, as transformers asks it."""
    requested = attention_choice.meant(requested_attention_implementation)
    if attention_choice.names_it(config) or requested == attention_choice.NAME:
        return False
    return is_flash_attention_requested(config, requested_attention_implementation, version)
