"""The answer to modeling files that ask ``is_flash_attention_requested``, and branch on it.

Some, such as vision towers, then pass ``cu_seqlens`` and call attention once for all sequences: these are told yes,
also where the kernel computes ``sdpa``. Others mean by it that attention takes no masks: SAM 2 then leaves masks that
are added to scores to torch, which drops them on an NPU; ESM C refuses chains, HRM prefixes, and masking_utils chunks.
These are told no. Generation is told yes.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from transformers.utils import generic
from transformers.utils.generic import is_flash_attention_requested

from kernels_ext_npu.binding.named_implementation import NPU_FLASH_ATTENTION
from kernels_ext_npu.binding.patches import Patches
from kernels_ext_npu.swaps.attention.eligibility import uses_kernel

# functions that each module that has imported them by name calls as its own
_REQUESTED, _LONGEST = "is_flash_attention_requested", "get_max_seqlen"
_MASKS, _TOWERS = "transformers.masking_utils", "transformers.vision_utils"
_ANSWERED = (_MASKS, _TOWERS, "transformers.models.")  # the modules of transformers whose question is answered here


def patch_files(files: Iterable[str], patches: Patches) -> None:
    """Replace the questions of these modules: each has imported them, so that there is no other place to answer."""
    for name in {*files, _TOWERS} & sys.modules.keys():
        if name.startswith("transformers.") and not name.startswith(_ANSWERED):
            continue
        file = sys.modules[name]
        if vars(file).get(_REQUESTED) is is_flash_attention_requested:
            answer = functools.partial(_is_requested, name != _MASKS and _source_passes_cu_seqlens(name))
            patches.attribute(file, _REQUESTED, answer)
        if _LONGEST in vars(file) and vars(file)[_LONGEST] is generic.get_max_seqlen:  # from transformers 5.22 on
            patches.attribute(file, _LONGEST, _given_max_seqlen)


@functools.cache
def _source_passes_cu_seqlens(name: str) -> bool:
    try:
        return "cu_seq_lens_q=" in inspect.getsource(sys.modules[name])
    except OSError:  # there is no source
        return True


def _is_requested(
    passes_cu_seqlens: bool, config: Any = None, requested_attention_implementation: Any = None, version: Any = None
) -> bool:
    """Answer in place of ``is_flash_attention_requested``: the kernel is one to files that pass ``cu_seqlens``."""
    requested = requested_attention_implementation
    is_named = NPU_FLASH_ATTENTION.is_named_by(config) or requested in NPU_FLASH_ATTENTION.names
    if version is None and (is_named or (passes_cu_seqlens and config is not None and uses_kernel(config))):
        return passes_cu_seqlens
    return is_flash_attention_requested(config, requested, version)


def _given_max_seqlen(
    cu_seqlens: Tensor, config: Any, kwargs: dict | None = None, kwarg_name: str = "max_seqlen"
) -> int | None:
    """Return the longest sequence, in place of ``get_max_seqlen``: for the kernel only what the caller gave."""
    if NPU_FLASH_ATTENTION.is_named_by(config):
        return (kwargs or {}).pop(kwarg_name, None)
    return generic.get_max_seqlen(cu_seqlens, config, kwargs, kwarg_name)
