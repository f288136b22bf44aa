"""torch's ``flex_attention`` by the kernel: masks and changes of scores that are functions of indices."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex_attention

from kernels_ext_npu.binding.named_implementation import NPU_FLASH_ATTENTION
from kernels_ext_npu.binding.patches import Patches

FLEX_ATTENTION = "flex_attention"


def install(patches: Patches) -> None:
    """Let the kernel compute torch's function on NPUs, also where others have imported it by its name.

    transformers calls it for models that name it, which are served by that name.
    """
    original = torch_flex_attention.flex_attention
    patches.method(torch_flex_attention, FLEX_ATTENTION, _flex_attention, NPU_FLASH_ATTENTION.is_registered)
    for name, module in sys.modules.copy().items():
        own = getattr(module, "__dict__", {})  # some import what they have not, if they are asked for it
        if own.get(FLEX_ATTENTION) is original and not name.startswith("transformers."):
            patches.attribute(module, FLEX_ATTENTION, torch_flex_attention.flex_attention)


def _flex_attention(original: Callable, query: Tensor, *args: Any, **kwargs: Any) -> Any:
    if query.device.type != "npu":
        return original(query, *args, **kwargs)
    from kernels_ext_npu.flex_attention import score_functions  # for those that call it alone

    return score_functions.flex_attention(query, *args, **kwargs)
