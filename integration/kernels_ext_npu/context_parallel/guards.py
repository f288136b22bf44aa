"""Guards for sequence parallelism: where each device has a part of a sequence, what needs the whole one raises.

Attention of a part would see that part only, unless keys or heads are exchanged around it. torch's context parallelism
exchanges keys in its replacement of ``scaled_dot_product_attention``; frameworks exchange heads in their entry of
transformers' table, which the kernel would silently replace. Convolutions and recurrences would restart in every part.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kernels_ext_npu.binding import lazy_swap, registration
from kernels_ext_npu.binding.forward_with_labels import forward_with_labels
from kernels_ext_npu.catalogue import LINEAR_ATTENTION, RECURRENCES
from kernels_ext_npu.matching.function_scan import called_functions
from kernels_ext_npu.matching.lookup import find_pattern

_TORCH = "torch's context_parallel"


@dataclass(frozen=True)
class _Framework:
    """Describes a framework that splits sequences between devices."""

    name: str
    module: str  # its module that knows the number of devices a sequence is split between
    parts: Callable[[ModuleType], int | None]  # reads that number from the module
    wraps: bool  # whether its entry of transformers' table gathers heads around an attention that it calls
    advice: str  # what to configure, so that it does


def _ulysses(module: ModuleType) -> int:
    return module.get_ulysses_sequence_parallel_world_size()


_FLASH = 'choose attn_implementation="flash_attention_2"'
_FRAMEWORKS = (
    _Framework(
        "ms-swift",
        "swift.sequence_parallel.sequence_parallel",
        lambda module: module.sequence_parallel.world_size,
        True,
        "choose --attn_impl sdpa or flash_attention_2",
    ),
    _Framework(
        "DeepSpeed",
        "deepspeed.runtime.sequence_parallel.parallel_state_sp",
        lambda module: module._SEQUENCE_PARALLEL_GROUP and module.get_sequence_parallel_world_size(),
        True,
        "name the same in attn_implementation and sp_attn_implementation (core_attn_implementation)",
    ),
    _Framework("verl", "verl.utils.ulysses", _ulysses, False, _FLASH),
    _Framework(
        "LLaMA-Factory",
        "llamafactory.v1.plugins.model_plugins.parallelization.ulysses",
        _ulysses,
        False,
        _FLASH,
    ),
)


def exchanges_keys() -> bool:
    """Tell whether torch's context parallelism is on.

    torch and torch_npu exchange keys in what they put into the place of scaled_dot_product_attention for it.
    """
    function = F.scaled_dot_product_attention
    if function is torch._C._nn.scaled_dot_product_attention:
        return False
    return ".tensor.experimental." in (getattr(function, "__module__", None) or "")


def exchange() -> ModuleType:
    """Return what exchanges keys; it is imported when that is first done."""
    from kernels_ext_npu.context_parallel import attention

    return attention


def are_split() -> bool:
    """Tell whether each device has a part of every sequence."""
    return exchanges_keys() or _framework() is not None


def refuse_partial_sequence(module: nn.Module, name: str, is_served: bool = True) -> None:
    """Raise if causal attention would see a part of each sequence only, with no exchange of keys or heads.

    Args:
        module: whose attention is to be computed; one that is not causal, as of images, gets them whole.
        name: of the implementation that it calls, in messages.
        is_served: whether the kernel computes it, for which keys are exchanged.
    """
    if not getattr(module, "is_causal", True):
        return
    if name == "eager" and exchanges_keys() and not is_served:
        raise ValueError(
            f"{name}: {_TORCH} exchanges keys in torch's scaled_dot_product_attention, which is not called here, and "
            'each device would see its own part only: choose attn_implementation="sdpa", or train without context '
            "parallelism"
        )
    framework = _framework()
    if framework is None:
        return
    function: Any = ALL_ATTENTION_FUNCTIONS.get(module.config._attn_implementation)  # type: ignore[union-attr]
    place = getattr(getattr(function, "func", function), "__module__", "") or ""
    if not (framework.wraps and place.partition(".")[0] == framework.module.partition(".")[0]):
        raise ValueError(
            f"{name}: {framework.name} splits sequences between devices, and gathers nothing around this attention, of "
            f"which each would see its own part only: {framework.advice}"
        )


def share_recurrences(model: nn.Module) -> None:
    """Let a model's convolutions and recurrences see whole sequences where torch splits them, or raise."""
    if not are_split():
        return
    from kernels_ext_npu.context_parallel import recurrences  # most models see whole sequences

    if lazy_swap.waits(model):
        lazy_swap.swap(model, ())
    active = registration.current
    for module in model.modules():
        if not _carries_state(type(module)):
            continue
        functions = [callee.function for callee in called_functions(type(module)) if callee.kind is LINEAR_ATTENTION]
        if active is None or not (exchanges_keys() and functions and all(map(recurrences.serves, functions))):
            who = framework.name if (framework := _framework()) else _TORCH
            raise ValueError(
                f"{type(module).__name__}: {who} splits sequences between devices, and its convolution and "
                "recurrence would begin anew in the part of each: train this model without sequence or context "
                "parallelism"
            )
        for cls in {type(function) for function in functions}:
            if not hasattr(cls.__call__, "__wrapped__"):  # that of swaps/functions.py wraps none
                active.patches.method(cls, "__call__", recurrences.compute, exchanges_keys)


def refuse_unshifted(model: PreTrainedModel, given: dict[str, Any], caller: FrameType) -> None:
    """Raise if a language model would shift labels within a part, whose first label is for another device's token.

    Frameworks compute their losses themselves.

    Args:
        model: is called.
        given: by name.
        caller: may be the forward of the language model, which somebody has called without its model, as peft did.
    """
    if not exchanges_keys():
        return
    from transformers.loss.loss_utils import ForCausalLMLoss  # register() need not wait for it

    if given.get("labels") is None and (around := forward_with_labels(caller)) is not None:
        given = around.f_locals | around.f_locals.get("kwargs", {})
        model = given["self"]
    is_shifted = given.get("labels") is None or given.get("shift_labels") is not None
    if not is_shifted and getattr(model, "loss_function", None) is ForCausalLMLoss:
        raise ValueError(
            f"{type(model).__name__}: {_TORCH} splits sequences between devices, and labels would be shifted within "
            "the part of each: give the model shift_labels, too, and split them as a buffer, with num_items_in_batch"
        )


def refuse_own_positions(model: PreTrainedModel) -> None:
    """Raise if a model counts positions itself while sequences are split: it would begin at zero in each part."""
    if exchanges_keys() and "position_ids" in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"{type(model).__name__}: {_TORCH} splits sequences between devices, and positions would begin at zero on "
            "each: give the model position_ids, and split them as a buffer"
        )


def refuse_mask(module: nn.Module, mask: Any) -> None:
    """Raise if torch is to compute attention with exchanged keys, and a mask is more than causal."""
    structure = getattr(mask, "structure", None)
    if mask is None or (
        structure is not None and structure.sequence_ids is structure.chunk is structure.band.left is None
    ):
        return
    raise ValueError(
        f"{type(module).__name__}: {_TORCH} exchanges keys, and computes causal and full attention alone where the "
        "kernel does not serve: no window, no packed sequences and no padding"
    )


def refuse_sinks(query: Tensor, sinks: Tensor | None) -> None:
    """Raise if a query ``[B, N, S, D]`` has fewer heads than there are sinks, since a framework has split the heads."""
    if sinks is None or len(sinks) == query.shape[1]:
        return
    framework = _framework()
    if framework is not None:
        raise ValueError(
            f"{framework.name} splits {len(sinks)} heads between devices, and not their sinks: train this model "
            "without sequence parallelism"
        )


def gathered_cu_seqlens(module: nn.Module, query: Tensor, positions: Any) -> dict[str, Tensor]:
    """Return ``cu_seqlens`` of packed sequences that a framework has gathered, as arguments of attention.

    Masks are of no use there: a model makes them of the positions of its own part, or none. As transformers' flash
    attentions do, a batch of one row is looked at. The host waits for it in each layer.

    Args:
        module: whose attention it is.
        query: ``[B, N, S, D]``, of the whole sequences.
        positions: ``[B, S]``, of the whole sequences.
    """
    if torch.compiler.is_compiling() or _framework() is None or not getattr(module, "is_causal", True):
        return {}
    if not isinstance(positions, Tensor) or positions.shape != (1, query.shape[2]):
        return {}
    begins = (torch.diff(positions[0].cpu()) != 1).nonzero().flatten() + 1
    if not len(begins):
        return {}
    ends = torch.tensor([0, *begins.tolist(), query.shape[2]], dtype=torch.int32)
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}


def _carries_state(cls: type[nn.Module]) -> bool:
    """Tell whether a class of transformers carries a recurrent state across tokens."""
    forward: Any = inspect.unwrap(cls.forward)
    if not forward.__module__.startswith("transformers."):
        return False
    pattern = find_pattern(cls)
    is_recurrence = pattern is not None and pattern.layers[0] in RECURRENCES.layers
    return is_recurrence or any(callee.kind is LINEAR_ATTENTION for callee in called_functions(cls))


@torch.compiler.assume_constant_result
def _framework() -> _Framework | None:
    """Return the framework that is splitting sequences now; None if none is."""
    for framework in _FRAMEWORKS:
        module = sys.modules.get(framework.module)
        if module is not None and (framework.parts(module) or 1) > 1:
            return framework
    return None
