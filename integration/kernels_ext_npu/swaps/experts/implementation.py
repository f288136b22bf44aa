"""The experts implementation ``npu_grouped_mm`` of transformers, which configs name.

It is the forward of the layer `MoEExperts`, called by name. While kernels are registered, models that would take
transformers' default take it, on the NPU; on other devices it hands over to that default. Who names another
implementation gets that one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import grouped_mm_experts_forward

from kernels_ext_npu.binding import forward_binding, registration
from kernels_ext_npu.binding.named_implementation import NPU_GROUPED_MM
from kernels_ext_npu.swaps.experts.serving import is_experts

DEFAULT = "grouped_mm"  # transformers' default


def npu_grouped_mm(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute the experts of a module: transformers calls this by the name in the module's config.

    Args:
        hidden_states: ``[T, H]``.
        top_k_index: ``[T, k]``, the experts of each token.
        top_k_weights: ``[T, k]``, and how much each of them counts.

    Returns:
        ``[T, H]``.
    """
    if hidden_states.device.type == "npu":
        layers = registration.package(NPU_GROUPED_MM.repository).layers
        try:
            return layers.MoEExperts.forward(self, hidden_states, top_k_index, top_k_weights)
        except (AttributeError, IndexError, TypeError, ValueError):  # what does not fit is refused as without a kernel
            pass
    return grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)


def other_than_ours(config: Any) -> str | None:
    """Return the implementation that somebody asked for; None if nobody did, or it is ours."""
    implementation = NPU_GROUPED_MM.named_in(config)
    if implementation in (None, NPU_GROUPED_MM.name):
        return None
    if implementation == DEFAULT and not (
        registration.current and registration.current.patches.knows(config, NPU_GROUPED_MM.field)
    ):
        return None
    return str(implementation)


def choose(original: Callable, self: PreTrainedModel, requested: str | None) -> str:
    """Return the implementation of a model, in place of its ``get_correct_experts_implementation``."""
    assert registration.current is not None
    chosen = original(self, requested)
    if chosen == NPU_GROUPED_MM.name or (requested is None and chosen == DEFAULT):
        NPU_GROUPED_MM.set_in(self.config, DEFAULT)
        registration.try_package(NPU_GROUPED_MM.repository)
        return NPU_GROUPED_MM.name
    if chosen == DEFAULT:  # whoever asks for that gets it, also from kernelize()
        registration.current.patches.note(self.config, NPU_GROUPED_MM.field, DEFAULT, DEFAULT)
    return chosen


def set_implementation(original: Callable, self: PreTrainedModel, requested: str | dict) -> None:
    """Let a model name what was asked for, in place of its ``set_experts_implementation``.

    What `kernels` bound to modules is taken out where that is another one: it does not look at the config.
    """
    original(self, requested)
    for module in self.modules():
        if is_experts(module) and other_than_ours(module.config) is not None:
            forward_binding.take_out(module)
