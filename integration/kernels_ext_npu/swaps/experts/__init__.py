"""Experts: the implementation ``npu_grouped_mm``, and what the kernel knows of the modules that it serves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from kernels_ext_npu.binding.forward_binding import kernel_forward
from kernels_ext_npu.binding.named_implementation import NPU_GROUPED_MM
from kernels_ext_npu.binding.registration import Registration
from kernels_ext_npu.swaps.decision import Decision, Finder, Swapping, View
from kernels_ext_npu.swaps.experts import implementation

# layer -> the submodule that it computes without calling it
_BYPASSED = {
    **dict.fromkeys((*implementation.WITH_LISTS, "ScaledTokensMoEBlock"), "experts"),
    "FlatExperts": "mlp",
    "CorrectedSoftmaxTopKRouter": "moe_statics",
}


def install(registration: Registration) -> None:
    """Enter the implementation into transformers' table, and let models take it that would take the default."""
    if NPU_GROUPED_MM.is_registered():
        patches, is_in_use = registration.patches, NPU_GROUPED_MM.is_registered
        patches.item(ALL_EXPERTS_FUNCTIONS._global_mapping, NPU_GROUPED_MM.name, implementation.npu_grouped_mm)
        patches.method(PreTrainedModel, "get_correct_experts_implementation", implementation.choose, is_in_use)
        patches.method(PreTrainedModel, "set_experts_implementation", implementation.set_implementation, is_in_use)


def put(view: View, decisions: Iterable[Decision], swapping: Swapping) -> None:
    """Let the kernel recognise the activations of experts, and remember the forwards of submodules that it bypasses.

    It does so now, since it cannot while a graph is captured.
    """
    for module, layer, package in view.placed:
        if (name := _BYPASSED.get(layer)) is not None:
            bypassed: Any = getattr(module, name)
            first = bypassed[0] if isinstance(bypassed, nn.ModuleList) else bypassed
            package.expert_lists.remember_forward(bypassed, kernel_forward(first))
    for module, kernel in implementation.served(view):
        if not kernel.expert_activation.is_current(module):
            kernel.expert_activation.forget(module)
        kernel.expert_activation.recognised_activation(module)


def revert(view: View) -> None:
    """Give a model the default back, and forget its gates."""
    for module, kernel in implementation.served(view):
        kernel.expert_activation.forget(module)
    for module in implementation.experts(view):  # one config is that of many
        NPU_GROUPED_MM.take_out(module.config, implementation.DEFAULT)


FINDER = Finder("experts", put=put, install=install, revert=revert, remarks=implementation.remarks)
