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
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from transformers.utils import generic
from transformers.utils.generic import is_flash_attention_requested

from kernels_ext_npu.binding.named_implementation import NPU_FLASH_ATTENTION
from kernels_ext_npu.binding.patches import Patches
from kernels_ext_npu.swaps.attention.attn_implementation import canonical_name
from kernels_ext_npu.swaps.attention.eligibility import uses_kernel

_MASKS = "transformers.masking_utils"
FILES = (_MASKS, "transformers.models.")  # the modules of transformers whose question is answered here
_QUESTION = is_flash_attention_requested.__name__
_SHARED = "transformers.vision_utils"  # what towers count their sequences with
_LONGEST = "get_max_seqlen"  # transformers 5.22


def patch_files(files: Iterable[str], patches: Patches) -> None:
    """Replace the question in these modules, where they import it; without its source, a file is told yes."""
    for name in (*files, _SHARED):
        is_answered = name.startswith((*FILES, _SHARED)) or not name.startswith("transformers.")
        if name not in sys.modules or not is_answered:
            continue
        file = sys.modules[name]
        if vars(file).get(_QUESTION) is is_flash_attention_requested:
            answer = functools.partial(_is_flash_attention, name != _MASKS and _source_passes_cu_seqlens(name))
            patches.attribute(file, _QUESTION, answer)
        longest = vars(generic).get(_LONGEST)
        if vars(file).get(_LONGEST) is longest and longest is not None:
            patches.attribute(file, _LONGEST, functools.partial(_max_seqlen, longest))


def passes_cu_seqlens(cls: type[nn.Module]) -> bool:
    """Tell whether the file of a class was told that it calls a flash attention, so that it passes ``cu_seqlens``."""
    return getattr(vars(sys.modules[cls.__module__]).get(_QUESTION), "args", None) == (True,)


@functools.cache
def _source_passes_cu_seqlens(name: str) -> bool:
    try:
        return "cu_seq_lens_q=" in inspect.getsource(sys.modules[name])
    except OSError:
        return True


def _is_flash_attention(
    passes_cu_seqlens: bool, config: Any = None, requested_attention_implementation: Any = None, version: Any = None
) -> bool:
    """Answer in place of ``is_flash_attention_requested``: the kernel is one to files that pass ``cu_seqlens``."""
    requested = canonical_name(requested_attention_implementation)
    is_named = NPU_FLASH_ATTENTION.is_named_by(config) or requested in NPU_FLASH_ATTENTION.names
    if version is None and (is_named or (passes_cu_seqlens and config is not None and uses_kernel(config))):
        return passes_cu_seqlens
    return is_flash_attention_requested(config, requested, version)


def _max_seqlen(
    original: Callable, cu_seqlens: Tensor, config: Any, kwargs: dict | None = None, kwarg_name: str = "max_seqlen"
) -> int | None:
    """Return the longest sequence, in place of ``get_max_seqlen``: for the kernel only what the caller gave."""
    if NPU_FLASH_ATTENTION.is_named_by(config):
        return None if kwargs is None else kwargs.pop(kwarg_name, None)
    return original(cu_seqlens, config, kwargs, kwarg_name)
