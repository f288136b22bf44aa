"""Whether a report is true: what it calls swapped runs a kernel, which computes what the module's class does."""

from __future__ import annotations

import inspect
import sys
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import kernels_ext_npu
import softnpu
from kernels_ext_npu.catalogue import ATTENTION
from kernels_ext_npu.swapping import forwards
from kernels_ext_npu.swapping.attention_interface import npu_flash_attention
from kernels_ext_npu.swapping.experts_interface import npu_grouped_mm
from tests.support.programs.acts.modes import stays_off_the_hub
from tests.support.programs.side import Side

CHANGED = "changed since it was swapped in"


def changed(side: Side) -> bool:
    """Tell whether the report names a kernel that no longer fits, which the next look takes out."""
    return any(row.reason is not None and row.reason.startswith(CHANGED) for row in kernels_ext_npu.report(side.model))


def look_again(side: Side, seed: int) -> None:
    """Do what the report says of kernels that no longer fit, or change the mode, which looks at them, too."""
    model = side.pretrained
    if seed % 2 and model.use_kernels and stays_off_the_hub(side):
        model.train(not model.training).train(not model.training)
        return
    reasons = [row.reason or "" for row in kernels_ext_npu.report(side.model)]
    advised = {reason.rpartition("; ")[2].partition("(")[0] for reason in reasons if reason.startswith(CHANGED)}
    assert advised <= {"kernelize", "restore"}
    getattr(kernels_ext_npu, max(advised))(side.model)  # what restores needs no device


def assert_report_is_true(side: Side, seed: int, limits: dict[torch.dtype, float]) -> None:
    """Compare every row with what is in place, and the values of one kernel with those of the module's own forward."""
    served = []
    for row in kernels_ext_npu.report(side.model):
        module = side.model.get_submodule(row.module)
        if row.swapped:
            served.append((row, module))
        elif row.function is None and not (row.reason or "").startswith((CHANGED, "served by")):
            assert forwards.kernel_forward(module) is None, row
    if not served:
        return
    row, module = Random(seed).choice(served)
    if any(parametrize.is_parametrized(child) for child in module.modules()):
        return  # some change when they are called
    dtype = next((p.dtype for p in module.parameters()), torch.float32)
    with torch.no_grad():
        args = _arguments(row, module, side, dtype)
        own, kernel = _forwards(row, module)
        expected = own(*args)
        softnpu.reset_counters()
        found = kernel(*args)
    if row.kind == "norms" and side.device.type == "npu":
        assert any(name.startswith("npu_") for name, count in softnpu.counters().items() if count), row
    for a, b in zip(_tensors(found), _tensors(expected), strict=True):
        assert a.dtype == b.dtype, row
        error = (a.double().cpu() - b.double().cpu()).norm() / b.double().cpu().norm().clamp(min=1e-30)
        assert error <= limits.get(dtype, 0.0), row


def _forwards(row: Any, module: nn.Module) -> tuple[Any, Any]:
    """Return the forward of a class, and that of the kernel in its place."""
    if row.function is not None:
        function = vars(sys.modules[type(module).__module__])[row.function]
        return lambda *args: type(function).forward(function, *args), function.forward
    if row.kind == ATTENTION.in_models:
        options = {"scaling": module.scaling, "s_aux": getattr(module, "sinks", None)}
        eager = sys.modules[type(module).__module__].eager_attention_forward
        return lambda *args: eager(module, *args, **options)[:1], lambda *args: npu_flash_attention(
            module, *args, **options
        )[:1]
    own, kernel = inspect.unwrap(type(module).forward), forwards.kernel_forward(module) or npu_grouped_mm
    if row.kind == "rotary tables":
        own = type(module).forward  # what it wraps switches gradients off
    return lambda *args: own(module, *args), lambda *args: kernel(module, *args)


def _arguments(row: Any, module: Any, side: Side, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(side.device, dtype)

    config = side.pretrained.config
    if row.function is not None:
        (_, table), *_ = side.named("RotaryEmbedding")
        heads = config.num_attention_heads
        q, k = draw(2, heads, 5, _head(config)), draw(2, heads, 5, _head(config))
        return q, k, *table(q, torch.arange(5, device=side.device)[None])
    if row.kind == ATTENTION.in_models:
        heads, keys = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
        mask = torch.full((5, 5), torch.finfo(dtype).min, dtype=dtype, device=side.device).triu(1)[None, None]
        return draw(2, heads, 5, _head(config)), *(draw(2, keys, 5, _head(config)) for _ in range(2)), mask
    if row.kind == "norms":
        weight = getattr(module, "weight", None)
        return (draw(2, 3, 32 if weight is None else weight.shape[-1]),)
    if row.kind == "rotary tables":
        return draw(2, 5, 32), torch.arange(5, device=side.device)[None]
    if row.kind == "experts":
        index = torch.tensor([[0, 1], [2, 3], [3, 0]], device=side.device)
        return draw(3, 32), index, draw(3, 2).abs()
    return (draw(3, 32),)


def _head(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [t for t in result if t.is_floating_point()]
