"""The experts implementation ``npu_grouped_mm`` of transformers.

It is the forward of the layer `MoEExperts`, called by name. While kernels are registered, models that would take
transformers' default take it, on the NPU; on other devices it hands over to that default. Who names another
implementation gets that one.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from kernels_ext_npu.swapping import experts_choice, forwards, state
from kernels_ext_npu.swapping.experts_choice import NAME
from kernels_ext_npu.swapping.patches import Patches

REPOSITORY, LAYER = "FusedMoE", "MoEExperts"


def npu_grouped_mm(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute the experts of a module: transformers calls this by the name in the module's config.

    Args:
        hidden_states: ``[T, H]``.
        top_k_index: ``[T, k]``, the experts of each token.
        top_k_weights: ``[T, k]``, and how much each of them counts.

    Returns:
        ``[T, H]``.
    """
    if hidden_states.device.type != "npu":
        return grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    try:
        return state.package(REPOSITORY).layers.MoEExperts.forward(self, hidden_states, top_k_index, top_k_weights)
    except (AttributeError, IndexError, TypeError, ValueError):  # what does not fit is refused as without a kernel
        pass
    return grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)


def install(patches: Patches) -> None:
    """Register the implementation, and let models take it that would take the default."""
    patches.item(ALL_EXPERTS_FUNCTIONS._global_mapping, NAME, npu_grouped_mm)
    patches.method(PreTrainedModel, "get_correct_experts_implementation", _get_correct, is_installed)
    patches.method(PreTrainedModel, "set_experts_implementation", _set, is_installed)


def is_installed() -> bool:
    """Tell whether models can take the implementation."""
    return state.uses(REPOSITORY)


def _get_correct(original: Callable, self: PreTrainedModel, requested: str | None) -> str:
    chosen = experts_choice.note(self.config, requested, original(self, requested))
    if chosen == NAME:
        state.try_package(REPOSITORY)
    return chosen


def _set(original: Callable, self: PreTrainedModel, requested: str | dict) -> None:
    """Set what was asked for, and take out what `kernels` bound to modules, which does not look at the config."""
    original(self, requested)
    for module in self.modules():
        if experts_choice.is_experts(module) and experts_choice.named(module.config) is not None:
            forwards.take_out(module)
