"""Experts: the implementation ``npu_grouped_mm``, which configs name, and what the kernel knows of those it serves.

It is the forward of the layer `MoEExperts`, called by name. While kernels are registered, models that would take
transformers' default take it, on the NPU; on other devices it hands over to that default. Who names another
implementation gets that one.

Other people's experts that call torch's products by groups are served by these: binding/torch_operators/grouped_mm.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from kernels_ext_npu.binding import forward_binding, registration
from kernels_ext_npu.binding.devices import awaits_weights, is_elsewhere
from kernels_ext_npu.binding.forward_binding import bound_package, kernel_forward
from kernels_ext_npu.binding.named_implementation import NPU_GROUPED_MM
from kernels_ext_npu.binding.registration import Registration
from kernels_ext_npu.binding.torch_operators import grouped_mm
from kernels_ext_npu.catalogue import EXPERTS
from kernels_ext_npu.matching.fingerprint import is_experts_class
from kernels_ext_npu.module_state import has_hooks
from kernels_ext_npu.swaps import refusals
from kernels_ext_npu.swaps.decision import Decision, Finder, Swapping, View

DEFAULT = "grouped_mm"  # transformers' default
_ASKED = "".join(DEFAULT)  # the same for who asked for it, told by identity: other readers of configs see no difference
LAYER = "MoEExperts"  # what the implementation calls by name
WITH_LISTS = ("SparseMoEBlock", "GatedMoEBlock")  # the layers that serve blocks with a list of experts
# layer -> the submodule that it computes without calling it
_BYPASSED = {
    **dict.fromkeys((*WITH_LISTS, "ScaledTokensMoEBlock"), "experts"),
    "FlatExperts": "mlp",
    "CorrectedSoftmaxTopKRouter": "moe_statics",
}


def install(active: Registration) -> None:
    """Enter the implementation into transformers' table, and let models take it that would take the default."""
    if NPU_GROUPED_MM.is_registered():
        patches, is_in_use = active.patches, NPU_GROUPED_MM.is_registered
        patches.item(ALL_EXPERTS_FUNCTIONS._global_mapping, NPU_GROUPED_MM.name, npu_grouped_mm)
        patches.method(PreTrainedModel, "get_correct_experts_implementation", choose, is_in_use)
        patches.method(PreTrainedModel, "set_experts_implementation", set_implementation, is_in_use)


def find(view: View) -> Iterator[Decision]:
    """Decide of every module of other people's code that multiplies by torch's products by groups."""
    for path, module in view.instances([cls for cls, facts in view.facts.items() if facts.calls_grouped_mm]):
        name, reason = NPU_GROUPED_MM.name, _refusal(module)
        present = name if reason is None else None
        yield Decision(path, module, name, reason, present, kind=EXPERTS, is_candidate=reason is None)


def put(view: View, decisions: Iterable[Decision], swapping: Swapping) -> None:
    """Let the kernel recognise the activations of experts, and remember the forwards of submodules that it bypasses.

    It does so now, since it cannot while a graph is captured.
    """
    for module, (layer, package) in view.placed.items():
        if (name := _BYPASSED.get(layer)) is not None:
            bypassed: Any = getattr(module, name)
            first = bypassed[0] if isinstance(bypassed, nn.ModuleList) else bypassed
            package.expert_lists.remember_forward(bypassed, kernel_forward(first))
    for module, kernel in _served(view):
        if not kernel.expert_activation.is_current(module):
            kernel.expert_activation.forget(module)
        kernel.expert_activation.recognised_activation(module)


def revert(view: View) -> None:
    """Give a model the default back, and forget its gates."""
    for module, kernel in _served(view):
        kernel.expert_activation.forget(module)
    for module in _modules(view):  # one config is that of many
        NPU_GROUPED_MM.take_out(module.config, DEFAULT)


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
    implementation = getattr(config, NPU_GROUPED_MM.attribute, None)
    is_default = implementation == DEFAULT and implementation is not _ASKED
    return None if is_default or implementation in (None, NPU_GROUPED_MM.name) else implementation


def choose(original: Callable, self: PreTrainedModel, requested: str | None) -> str:
    """Return the implementation of a model, in place of its ``get_correct_experts_implementation``."""
    chosen = original(self, requested)
    if chosen == NPU_GROUPED_MM.name or (requested is None and chosen == DEFAULT):
        NPU_GROUPED_MM.set_in(self.config, DEFAULT, NPU_GROUPED_MM.name)
        registration.try_package(NPU_GROUPED_MM.repository)
        return NPU_GROUPED_MM.name
    return _ASKED if chosen == DEFAULT else chosen  # whoever asks for the default gets it, also from kernelize()


def set_implementation(original: Callable, self: PreTrainedModel, requested: str | dict) -> None:
    """Let a model name what was asked for, in place of its ``set_experts_implementation``.

    What `kernels` bound to modules is taken out where that is another one: it does not look at the config.
    """
    original(self, requested)
    for module in self.modules():
        if is_experts_class(type(module)) and other_than_ours(module.config) is not None:
            forward_binding.take_out(module)


def is_called_by_name(module: nn.Module) -> bool:
    """Tell whether the forward of an experts module ends in our implementation, through the name in its config."""
    is_experts = NPU_GROUPED_MM.is_registered() and is_experts_class(type(module))
    return is_experts and NPU_GROUPED_MM.is_named_by(module.config) and not is_elsewhere(module)


def serving_package(module: nn.Module) -> Any:
    """Return the package of the loaded kernel that serves an experts module; None for any other module."""
    if not is_experts_class(type(module)):
        return None
    if kernel_forward(module) is not None:
        return bound_package(module)
    active = registration.current
    return active.packages.get(NPU_GROUPED_MM.repository) if active and is_called_by_name(module) else None


def _refusal(module: nn.Module) -> str | None:
    """Return why the kernel does not compute torch's products by groups for a module; None where it does."""
    if not NPU_GROUPED_MM.is_registered():
        return refusals.left_out(NPU_GROUPED_MM.repository) or refusals.NOT_REGISTERED
    return refusals.elsewhere(module) if grouped_mm.IS_REPLACED else refusals.FORWARD_UNKNOWN


def _modules(view: View) -> list[Any]:
    """Return the modules of a model whose forward calls the implementation that their config names."""
    return [module for cls, facts in view.facts.items() if facts.is_experts for module in view.by_class[cls]]


def _served(view: View) -> list[tuple[Any, Any]]:
    """Return the experts of a model that are served, each with the package of the kernel."""
    return [(module, kernel) for module in _modules(view) if (kernel := serving_package(module)) is not None]


def remarks(view: View, served: list[Decision]) -> dict[Decision, str | None]:
    """Say what is not as fast as it could be in experts, or in blocks with a list of them, that are served."""
    return {decision: _remark(decision) for decision in served if decision.kind is EXPERTS}


def _remark(decision: Decision) -> str | None:
    module = decision.module
    if decision.present == NPU_GROUPED_MM.name:
        return refusals.by_torch("grouped_mm")
    if decision.present in WITH_LISTS:
        if bound_package(module) is None or awaits_weights():  # swaps/recognised/ has other people's
            return None
        reason = bound_package(module).expert_lists.unfit(module)
        return reason and f"expert by expert, since {reason}"
    kernel = serving_package(module)
    if kernel is None or isinstance(kernel.expert_activation.recognised_activation(module), kernel.Gate):
        is_by_name = kernel_forward(module) is None and is_called_by_name(module)
        return f"called by its own forward, as {NPU_GROUPED_MM.name}" if is_by_name else None
    if has_hooks(getattr(module, "act_fn", None)):
        return "what lies between its products is computed in torch, since hooks watch its activation"
    return "what lies between its products is computed in torch: the kernel has SwiGLU and the clipped SwiGLU"


FINDER = Finder("experts", find, put, install=install, revert=revert, remarks=remarks)
