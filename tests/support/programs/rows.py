"""Whether a report is true: what it calls swapped runs a kernel, which computes what the module's class does."""

import copy
import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_map_only
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kernels_ext_npu
import softnpu
from kernels_ext_npu.binding import forward_binding
from kernels_ext_npu.catalogue import ATTENTION, EXPERTS, HEADS, IMPLEMENTATION, NORMS, PATCHES, TABLES
from kernels_ext_npu.swaps.experts.implementation import npu_grouped_mm
from tests.support.programs.acts.kernels import stays_off_the_hub
from tests.support.programs.side import Side

HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim")
CHANGED = "changed since it was swapped in"


def look_again(side: Side, seed: int) -> tuple[kernels_ext_npu.Report, bool]:
    """Return the report; where it names kernels that no longer fit, do what it says, and return the one after that.

    A change of the mode looks at kernels, too.

    Returns:
        The report, and whether something was done.
    """
    report = kernels_ext_npu.report(side.model)
    reasons = [row.reason for row in report if row.reason is not None and row.reason.startswith(CHANGED)]
    if not reasons:
        return report, False
    model = side.pretrained
    if seed % 2 and model.use_kernels and stays_off_the_hub(side):
        modes = {module: module.training for module in model.modules()}
        model.train(not model.training)
        for module, is_training in modes.items():  # of which parts may have another than the model
            module.training = is_training
    else:
        advised = {reason.rpartition("; ")[2].partition("(")[0] for reason in reasons}
        assert advised <= {"kernelize", "restore"}
        getattr(kernels_ext_npu, max(advised))(side.model)  # what restores needs no device
    return kernels_ext_npu.report(side.model), True


def assert_report_is_true(
    report: kernels_ext_npu.Report, side: Side, seed: int, limits: dict[torch.dtype, float]
) -> None:
    """Compare every row with what is in place, and the values of one kernel with those of the module's own forward."""
    served = []
    for row in report:
        module = side.model.get_submodule(row.module)
        if row.swapped and row.kind != HEADS.in_models:  # the loss of the whole model shows what a head gives
            served.append((row, module))
        elif row.function is None and not (row.reason or "").startswith((CHANGED, "served by")):
            assert forward_binding.kernel_forward(module) is None, row
    if not served:
        return
    row, module = Random(seed).choice(served)
    if any(parametrize.is_parametrized(child) for child in module.modules()):
        return  # some change when they are called
    # that of what it multiplies with first, which may be a buffer, while adapters are of another one
    weights = (*(m.weight for m in module.modules() if isinstance(m, nn.Linear)), *module.parameters())
    dtype = weights[0].dtype if weights else torch.float32
    with torch.no_grad():
        called = _arguments(row, module, side, dtype)
        if called is None:
            return
        own, kernel = _forwards(row, module)
        args, kwargs = copy.deepcopy(called)  # some are written to
        expected = own(*args, **kwargs)
        softnpu.reset_counters()
        args, kwargs = called
        found = kernel(*args, **kwargs)
    if row.kind == NORMS.in_models and side.device.type == "npu":
        assert any(name.startswith("npu_") for name, count in softnpu.counters().items() if count), row
    for a, b in zip(_tensors(found), _tensors(expected), strict=True):
        assert a.dtype == b.dtype, row
        error = (a.double().cpu() - b.double().cpu()).norm() / b.double().cpu().norm().clamp(min=1e-30)
        assert error <= limits.get(dtype, 0.0), row


def _of_each_head(rule: Callable, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call the rule of a model, which has a query and a key for each head of values: layers hand ours those shared."""
    query, key = (tensor.repeat_interleave(value.shape[2] // tensor.shape[2], 2) for tensor in (query, key))
    return rule(query, key, value, *args, **kwargs)


def _forwards(row: Any, module: nn.Module) -> tuple[Any, Any]:
    """Return the forward of a class, and that of the kernel in its place."""
    if row.function is not None:
        function = _function(row, module)
        own = partial(type(function).forward, function)
        return partial(_of_each_head, own) if "GatedDeltaRule" in row.kernel else own, function.forward
    if row.kind == ATTENTION.in_models:
        options = {"scaling": module.scaling, "s_aux": getattr(module, "sinks", None)}
        eager = sys.modules[type(module).__module__].eager_attention_forward
        ours = ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION]
        return lambda *args: eager(module, *args, **options)[:1], lambda *args: ours(module, *args, **options)[:1]
    own, kernel = inspect.unwrap(type(module).forward), forward_binding.kernel_forward(module) or npu_grouped_mm
    if row.kind == TABLES.in_models:
        own = type(module).forward  # what it wraps switches gradients off
    return partial(own, module), partial(kernel, module)


def _function(row: Any, module: nn.Module) -> Any:
    return vars(sys.modules[type(module).__module__])[row.function]


def _arguments(row: Any, module: Any, side: Side, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return what to call a kernel with; None if the model does not call it."""
    takes_more = any(word in row.kernel for word in ("Gated", "Add"))
    if row.function is not None or row.kind in (TABLES.in_models, PATCHES.in_models) or takes_more:
        return _given(row, module, side, dtype)
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(side.device, dtype)

    if row.kind == ATTENTION.in_models:
        mask = torch.full((5, 5), torch.finfo(dtype).min, dtype=dtype, device=side.device).triu(1)[None, None]
        size = next(getattr(module, name) for name in HEAD_SIZES if hasattr(module, name))
        q, k, v = (draw(2, n * 2, 5, size) for n in (getattr(module, "num_key_value_groups", 1), 1, 1))
        return (q, k, v, mask), {}
    if row.kind == EXPERTS.in_models:
        index = torch.tensor([[0, 1], [2, 3], [3, 0]], device=side.device)
        return (draw(3, 32), index, draw(3, 2).abs()), {}
    weight = getattr(module, "weight", None)
    return (draw(2, 3, 32 if weight is None or row.kind != NORMS.in_models else weight.shape[-1]),), {}


# on the CPU: what kernels were called with, of which the model makes the arguments
_calls: dict[tuple[str, str, str, torch.dtype], tuple[tuple[Any, ...], dict[str, Any]]] = {}


def _given(
    row: Any, module: nn.Module, side: Side, dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return what the model called a function or a module with when this was first asked."""
    key = side.variant, row.path, type(module).__name__, dtype
    if key not in _calls:
        if side.has_steps:
            return None  # the twin is not called for it
        called = _noted(row, module, side)
        if called is None:
            return None
        _calls[key] = tree_map_only(Tensor, Tensor.cpu, called)
    return tree_map_only(Tensor, lambda tensor: tensor.to(side.device, copy=True), _calls[key])


def _noted(row: Any, module: nn.Module, side: Side) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Call the model, and return what it calls a function or a module with."""
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def note(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(tree_map_only(Tensor, Tensor.clone, (args, kwargs)))

    if row.function is None:
        handle = module.register_forward_pre_hook(lambda _, args, kwargs: note(args, kwargs), with_kwargs=True)
        side.run()
        handle.remove()
    else:
        function = _function(row, module)
        kernel = function.forward

        def noting(*args: Any, **kwargs: Any) -> Any:
            note(args, kwargs)
            return kernel(*args, **kwargs)

        function.forward = noting
        try:
            side.run()
            if not found:
                _decode(side)
        finally:
            function.forward = kernel
    return found[0] if found else None


def _decode(side: Side) -> None:
    """Call the model for a token, with the cache of others."""
    ids = side.inputs["input_ids"]
    with suppress(Exception):  # a model that cannot is not called so
        cache = side.model(input_ids=ids[:, :-1], use_cache=True).past_key_values
        side.model(input_ids=ids[:, -1:], past_key_values=cache)


def _tensors(result: Any) -> list[Tensor]:
    tensors = [result] if isinstance(result, Tensor) else result
    return [t for t in tensors if t is not None and t.is_floating_point()]
