"""Swaps kernels into a model that is already loaded, and out again."""

from __future__ import annotations

from typing import TypeVar

from kernels import Mode
from torch import nn

from kernels_ext_npu.binding import lazy_swap, registration, use_kernels_flag
from kernels_ext_npu.binding.devices import assume_npu_if_meta, check_is_module, computes_on
from kernels_ext_npu.lifecycle import pipeline
from kernels_ext_npu.lifecycle.register import register
from kernels_ext_npu.swaps import finders
from kernels_ext_npu.swaps.decision import View

Model = TypeVar("Model", bound=nn.Module)


def kernelize(model: Model, mode: Mode | None = None) -> Model:
    """Swap the kernels into a model on the NPU. Registers the bundled kernels if none are registered.

    A model without weights yet, all of whose parameters are on meta, takes them for the NPU too. Once its weights are
    loaded kernelize it again: gate and up of its MLPs become one product then.

    Args:
        model: a transformers model, or any other module of torch: what its parts compute decides what is swapped.
        mode: a ``kernels.Mode``; by default training or inference, as the model is.

    Returns:
        The model itself.

    Raises:
        TypeError: it is no module, such as the name of a model, or the mode is no ``kernels.Mode``.
        ValueError: no part of the model is on the NPU.

    Example:
        >>> import softnpu  # before torch, on a machine without an NPU
        >>> import torch
        >>> import kernels_ext_npu
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=1)
        >>> model = kernels_ext_npu.kernelize(LlamaForCausalLM(config).to("npu"))
        >>> softnpu.reset_counters()
        >>> model(torch.tensor([[1, 2, 3]], device="npu")).logits.shape
        torch.Size([1, 3, 32000])
        >>> softnpu.counters()["npu_rms_norm"]
        3
    """
    check_is_module("kernelize", model)
    if not isinstance(mode, Mode | None):
        raise TypeError(f"kernelize: mode must be a kernels.Mode, such as kernels.Mode.TRAINING, got {mode!r}")
    devices = {computes_on(tensor) for tensor in (*model.parameters(), *model.buffers())}
    with assume_npu_if_meta(model) as without_weights:
        if "npu" not in devices and not without_weights:
            given = ", ".join(sorted(devices)) or "no device"
            raise ValueError(f"kernelize: the model is on {given}; move it first: model.to('npu')")
        if registration.current is None:
            register()
        pipeline.swap_in(model, mode)
    return model


def restore(model: Model) -> Model:
    """Put the original forwards back; the model stays as it is through later ``train()``, ``eval()`` and calls.

    The functions that the model calls, such as rotary ones, go back for all models of its architecture: they are one
    object for the process. Attention is transformers' own until the model is kernelized again; where the model names
    ``npu_flash_attention``, it names again what it did before, or what transformers gives it by itself.

    Returns:
        The model itself.

    Raises:
        TypeError: it is no module, such as the name of a model.

    Example:
        >>> import softnpu  # before torch, on a machine without an NPU
        >>> import kernels_ext_npu
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=1)
        >>> model = kernels_ext_npu.kernelize(LlamaForCausalLM(config).to("npu"))
        >>> model = kernels_ext_npu.restore(model)
        >>> kernels_ext_npu.report(model).summary()
        '0 of 3 norms, 0 of 1 gated MLPs, 0 of 1 rotary calls, 0 of 1 rotary tables, 0 of 1 attention, 0 of 1 heads'
    """
    check_is_module("restore", model)
    if not use_kernels_flag.is_noted(model):  # a part of a model, which looks at all of its parts again
        registration.restored.update(model.modules())
    view = View(model)
    for _, module in view.named:
        if module._forward_pre_hooks:
            lazy_swap.forget(module)
    for finder in reversed(finders.FINDERS):
        finder.revert(view)
    for pretrained in pipeline.outermost(model):
        use_kernels_flag.forget(pretrained)
    return model
