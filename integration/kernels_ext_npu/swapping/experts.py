"""Modules of experts: which implementation they take, how their weights lie, and what there is to say about them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from kernels_ext_npu.references.hooks import has_hooks
from kernels_ext_npu.swapping import experts_choice, experts_interface, lasting, loaded, state
from kernels_ext_npu.swapping.devices import awaits_weights, is_elsewhere
from kernels_ext_npu.swapping.forwards import kernel_forward

Model = TypeVar("Model", bound=nn.Module)

_LISTS = ("SparseMoEBlock", "GatedMoEBlock")  # the layers that serve blocks with a list of experts
# what layers of the kernel compute without a call of it
_PASSED_BY = {
    **dict.fromkeys((*_LISTS, "ScaledTokensMoEBlock"), "experts"),
    "FlatExperts": "mlp",
    "CorrectedSoftmaxTopKRouter": "moe_statics",
}


def choose(model: nn.Module) -> None:
    """Let a model that was loaded before take the implementation, unless another one was named.

    The kernel looks at the gates now: it could not while a graph is captured.
    """
    for module in _experts_of(model):
        experts_choice.choose(module.config)
        if experts_choice.named(module.config) is None:
            state.try_package(experts_interface.REPOSITORY)
        if (kernel := _kernel(module)) is not None:
            kernel.gates.activation_of(module)


def meet(model: nn.Module) -> None:
    """Let the kernel take what modules compute now for what it computes without a call of them."""
    for module in model.modules():
        forward = kernel_forward(module)
        if forward is not None and (name := _PASSED_BY.get(loaded.layer_name(forward) or "")) is not None:
            passed_by: Any = module._modules[name]
            first = passed_by[0] if isinstance(passed_by, nn.ModuleList) else passed_by
            loaded.package(forward).blocks.remember_forward(passed_by, kernel_forward(first))


def look_again(model: nn.Module) -> None:
    """Let the kernel forget the gates of experts that have changed since it looked at them."""
    for module in _experts_of(model):
        if (kernel := _kernel(module)) is not None and not kernel.gates.is_current(module):
            kernel.gates.forget(module)


def has_changed(module: nn.Module) -> bool:
    """Tell whether the kernel computes the experts of a module with a gate that is not theirs any more."""
    kernel = _kernel(module) if experts_choice.is_experts(module) else None
    return kernel is not None and not kernel.gates.is_current(module)


def restore(model: nn.Module) -> None:
    """Give a model the default and its weights' memory back, where nobody else holds it and would not follow."""
    for module in _experts_of(model):
        if (kernel := _kernel(module)) is not None:
            kernel.gates.forget(module)
            for weight in _weights(module):
                if weight.dim() == 3 and weight.mT.is_contiguous() and kernel.layout.immovable(weight) is None:
                    kernel.layout.store_contiguous(weight)
    for module in _experts_of(model):  # one config is that of many
        experts_choice.give_back(module.config)


def transpose_experts(model: Model) -> Model:
    """Store the weights of experts so that the forward multiplies with contiguous matrices.

    transformers stores most of them the other way around, and ``npu_grouped_matmul`` is given transposed views. Stored
    like this, the views fall to the gradient of the input: it suits inference and frozen experts, where it is faster,
    which the device at hand has to tell. Nothing is held twice: the parameters are moved, one after the other.
    restore(model) moves them back, but for those that somebody else holds by then. Until then they are not contiguous:
    what views a parameter as one row, such as torch's ``parameters_to_vector``, raises.

    Returns:
        The model itself.

    Raises:
        ValueError: no experts of the model are served by the kernel, or a weight cannot be moved.

    Example:
        >>> import softnpu  # before torch, on a machine without an NPU
        >>> import kernels_ext_npu
        >>> from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
        >>> config = Qwen3MoeConfig(hidden_size=32, moe_intermediate_size=16, num_hidden_layers=1, num_experts=4)
        >>> model = kernels_ext_npu.kernelize(Qwen3MoeForCausalLM(config).to("npu"))
        >>> weight = model.model.layers[0].mlp.experts.down_proj
        >>> weight.shape, weight.stride()
        (torch.Size([4, 32, 16]), (512, 16, 1))
        >>> model = kernels_ext_npu.transpose_experts(model)
        >>> weight.shape, weight.stride()
        (torch.Size([4, 32, 16]), (512, 1, 32))
    """
    served = [(module, kernel) for module in _experts_of(model) if (kernel := _kernel(module)) is not None]
    if not served:
        raise ValueError(
            "transpose_experts: the model has no experts with a kernel: load it with device_map='npu' after "
            "register(), and look at report(model)"
        )
    moved = [(w, kernel.layout) for module, kernel in served if not module.is_transposed for w in _weights(module)]
    for weight, layout in moved:  # all or none
        if (reason := layout.immovable(weight)) is not None:
            raise ValueError(f"transpose_experts: {reason}: it would not follow. Let go of it first, nothing has moved")
    lasting.install_for_transposed()
    for weight, layout in moved:
        layout.store_transposed(weight)
    return model


def is_called_by_name(module: nn.Module) -> bool:
    """Tell whether the forward of an experts module ends in this implementation, through the name in its config."""
    if not experts_interface.is_installed() or not experts_choice.is_experts(module) or is_elsewhere(module):
        return False
    return getattr(module.config, "_experts_implementation", None) == experts_choice.NAME


def layer_by_name(module: nn.Module) -> str | None:
    """Return the layer that an experts module calls by name; None if it does not."""
    return experts_interface.LAYER if is_called_by_name(module) else None


def remark(module: nn.Module) -> str | None:
    """Return what is not as fast as it could be in experts, or in a block with a list of them, that are served."""
    reason = _remark_on_list(module) or _remark_on_gate(module)
    if reason is None and kernel_forward(module) is None and is_called_by_name(module):
        return f"called by its own forward, as {experts_choice.NAME}"
    return reason


def _remark_on_gate(module: nn.Module) -> str | None:
    kernel = _kernel(module) if experts_choice.is_experts(module) else None
    if kernel is None or isinstance(kernel.gates.activation_of(module), kernel.gates.Gate):
        return None
    if has_hooks(getattr(module, "act_fn", None)):
        return "what lies between its products is computed in torch, since hooks watch its activation"
    return "what lies between its products is computed in torch: the kernel has SwiGLU and the clipped SwiGLU"


def _remark_on_list(module: nn.Module) -> str | None:
    forward = kernel_forward(module)
    if forward is None or loaded.layer_name(forward) not in _LISTS or awaits_weights():
        return None
    reason = loaded.package(forward).blocks.unfit(module)
    return reason and f"expert by expert, since {reason}"


def _experts_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if experts_choice.is_experts(module)]


def _weights(module: Any) -> list[nn.Parameter]:
    weights = (module._parameters.get(name) for name in ("gate_up_proj", "up_proj", "down_proj"))
    return [weight for weight in weights if weight is not None]


def _kernel(module: nn.Module) -> Any:
    """Return the package of the loaded kernel that serves an experts module; None if none does."""
    forward: Callable | None = kernel_forward(module)
    if forward is not None:
        return loaded.package(forward) if loaded.layer_name(forward) else None
    return state.loaded_package(experts_interface.REPOSITORY) if is_called_by_name(module) else None
