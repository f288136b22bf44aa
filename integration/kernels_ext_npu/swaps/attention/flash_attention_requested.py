"""Files of transformers that ask whether attention is a flash attention, and go another way for it.

Some give it the lengths of sequences in place of one call for each, as vision towers do: so they do for ours, also
where it stands for ``sdpa``. Others mean flash-attn, which takes no masks: those of SAM 2 leave masks that are added to
scores to torch, which drops them on an NPU; ESM C refuses chains, HRM prefixes, and masking_utils chunks. To them ours
is as any other implementation. Generation is to know ours as flash.
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

from kernels_ext_npu.binding.patches import Patches
from kernels_ext_npu.swaps.attention.attn_implementation import canonical_name
from kernels_ext_npu.swaps.attention.eligibility import uses_kernel
from kernels_ext_npu.swaps.named_implementation import NPU_FLASH_ATTENTION

_MASKS = "transformers.masking_utils"
FILES = (_MASKS, "transformers.models.")  # of transformers, those that are answered
_QUESTION = is_flash_attention_requested.__name__
_SHARED = "transformers.vision_utils"  # what towers count their sequences with
_LONGEST = "get_max_seqlen"  # transformers 5.22


def patch_files(files: Iterable[str], patches: Patches) -> None:
    """Answer files, by their names, if they ask; whose source cannot be read is taken to give lengths."""
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
    """Tell whether the file of a class was answered that it calls a flash attention, to which it gives lengths."""
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
    """Tell a file whether an implementation is a flash attention: ours is, by any name, to one that gives lengths."""
    requested = canonical_name(requested_attention_implementation)
    is_named = NPU_FLASH_ATTENTION.is_named_by(config) or requested in NPU_FLASH_ATTENTION.names
    if version is None and (is_named or (passes_cu_seqlens and config is not None and uses_kernel(config))):
        return passes_cu_seqlens
    return is_flash_attention_requested(config, requested, version)


def _max_seqlen(
    original: Callable, cu_seqlens: Tensor, config: Any, kwargs: dict | None = None, kwarg_name: str = "max_seqlen"
) -> int | None:
    """Return how long the longest sequence is, in place of ``get_max_seqlen``: to ours what the caller says."""
    if NPU_FLASH_ATTENTION.is_named_by(config):
        return None if kwargs is None else kwargs.pop(kwarg_name, None)
    return original(cu_seqlens, config, kwargs, kwarg_name)
