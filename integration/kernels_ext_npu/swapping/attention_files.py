"""Files of transformers that ask whether attention is a flash attention, and go another way for it.

Some give it the lengths of sequences in place of one call for each, as vision towers do: so they do for ours, also
where it stands for ``sdpa``. Others mean flash-attn, which takes no masks: those of SAM 2 leave masks that are added to
scores to torch, which drops them on an NPU; ESM C refuses chains, HRM prefixes, and masking_utils chunks. To them ours
is as any other implementation.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel, masking_utils
from transformers.utils.generic import is_flash_attention_requested

from kernels_ext_npu.swapping import state
from kernels_ext_npu.swapping.attention_names import NAME, REPOSITORY, canonical_name, names_it
from kernels_ext_npu.swapping.attention_serving import has_replaced, stands_for
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
    patches.method(PreTrainedModel, "__init__", _adapting, lambda: state.uses(REPOSITORY))


def gives_lengths(cls: type[nn.Module]) -> bool:
    """Tell whether the file of a class was told that it calls a flash attention, to which it gives lengths."""
    return vars(sys.modules[cls.__module__]).get(_ASKED) is _takes_lengths


def _adapting(original: Callable, self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
    """Make a model, whose first act is to check the name of its implementation."""
    assert state.current is not None
    for name in {cls.__module__ for cls in type(self).__mro__}:
        if name.startswith(_MODELS) or not name.startswith("transformers."):  # generation is to know ours as flash
            _adapt(name, state.current.patches)
    original(self, *args, **kwargs)


def _adapt(name: str, patches: Patches) -> None:
    if vars(sys.modules.get(name)).get(_ASKED) is is_flash_attention_requested:
        patches.attribute(sys.modules[name], _ASKED, _takes_lengths if _writes(name) else _is_other_flash_attention)


@functools.cache
def _writes(name: str) -> bool:
    """Tell whether a file gives lengths to attention; one that cannot be read is left as it is."""
    try:
        return _LENGTHS in inspect.getsource(sys.modules[name])
    except OSError:
        return True


def _takes_lengths(config: Any = None, *args: Any, **kwargs: Any) -> bool:
    """Tell whether an implementation takes lengths, as transformers asks whether it is a flash attention."""
    is_ours = config is not None and not args and not kwargs and stands_for(config) and not has_replaced(config)
    return is_ours or is_flash_attention_requested(config, *args, **kwargs)


def _is_other_flash_attention(
    config: Any = None, requested_attention_implementation: str | None = None, version: Any = None
) -> bool:
    """Tell whether an implementation is a flash attention that is not ours, as transformers asks it."""
    if names_it(config) or canonical_name(requested_attention_implementation) == NAME:
        return False
    return is_flash_attention_requested(config, requested_attention_implementation, version)
