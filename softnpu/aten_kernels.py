"""Replace the kernels that torch_npu registers for ``aten::`` and ``fsdp::`` by kernels on the host."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey

from softnpu import aten_batch_norm  # noqa: F401  it registers its formulas
from softnpu.aten_missing_on_cpu import FORMULAS
from softnpu.composed_sdpa import prepares_masks_directly, scaled_dot_product_attention
from softnpu.host_kernel import on_host, refusal
from softnpu.kernel_registration import replace_kernel

aten = torch.library.Library("aten", "IMPL")
fsdp = torch.library.Library("fsdp", "IMPL")

# Allocation, storage and conversion stay with torch_npu: they move no data, or are composed of operators that are ours.
# So do all views, which the schema tells: their result aliases an argument that is not written to.
NATIVE = {
    "_pin_memory", "_thnn_fused_gru_cell", "_to_copy", "as_strided_", "empty.memory_format", "empty_like",
    "empty_strided", "is_pinned", "is_set_to", "new_empty_strided", "record_stream", "resize_", "resize_as_", "set_",
    "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor",
}  # fmt: skip

# torch_npu runs these from the autograd key with kernels of its own, which need CANN. torch's own take their place.
DIRECT = {
    "__ior__.Scalar", "__xor__.Scalar", "__xor__.Tensor", "affine_grid_generator_backward", "conv_tbc_backward",
    "fill_diagonal_", "gru.input", "lstm.input", "lstm_cell", "max.out", "min.out", "multilabel_margin_loss",
    "multilabel_margin_loss.out", "nanmean.out", "slogdet", "softmax.int",
}  # fmt: skip


def install() -> None:
    """Put a kernel on the host in the place of each of torch_npu's that would launch something."""
    for name in _registered("PrivateUse1"):
        op = _overload(name)
        if op is not None and name not in NATIVE and not _is_view(op):
            kernel = (
                on_host(op, FORMULAS.get(name)) if name in FORMULAS or _runs_on_host(op) else refusal(f"aten::{name}")
            )
            replace_kernel(aten, name, kernel)
    fsdp_operators = torch._ops._OpNamespace("fsdp")  # in torch.ops.fsdp, torch_npu 2.8 puts functions of its own
    for name in _registered("PrivateUse1", "fsdp"):
        kernel = on_host(getattr(fsdp_operators, name).default)
        kernel = _copy_in(kernel) if name == "all_gather_copy_in" else kernel
        replace_kernel(fsdp, name, kernel)
    for name in DIRECT & _registered("AutogradPrivateUse1"):
        replace_kernel(aten, name, _torchs_own(_overload(name)), "AutogradPrivateUse1")
    for name, adapt in {"one_hot": _one_hot, "lstm.data": _padded_lstm}.items():
        if name in _registered("AutogradPrivateUse1"):
            replace_kernel(aten, name, adapt(_torchs_own(_overload(name))), "AutogradPrivateUse1")
    if prepares_masks_directly():
        replace_kernel(aten, "scaled_dot_product_attention", scaled_dot_product_attention, "AutogradPrivateUse1")


def _copy_in(copy: Callable[..., Any]) -> Callable[..., Any]:
    """Return a part of the output too, as ``fsdp::all_gather_copy_in`` does without its schema saying so."""

    def kernel(
        inputs: Any, output: torch.Tensor, sizes: Any, numel: int, rank: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        copy(inputs, output, sizes, numel, rank)
        return output.narrow(0, numel * rank, numel), output

    return kernel


def _one_hot(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Take int32 too, which op-plugin gives back in int32 (OneHotKernelNpuOpApi.cpp)."""

    def one_hot(self: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
        return own(self, num_classes) if self.dtype != torch.int32 else own(self.long(), num_classes).int()

    return one_hot


def _padded_lstm(own: Callable[..., Any]) -> Callable[..., Any]:
    """Take rows with padding between them, as the device packs them; torch's own LSTM takes none."""

    def lstm(data: torch.Tensor, batch_sizes: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        largest = int(batch_sizes[0])
        rows = torch.cat([torch.arange(int(n)) + step * largest for step, n in enumerate(batch_sizes)]).to(data.device)
        if len(rows) == len(data):
            return own(data, batch_sizes, *args, **kwargs)
        output, *state = own(data[rows], batch_sizes, *args, **kwargs)
        return output.new_zeros(len(data), output.shape[1]).index_copy(0, rows, output), *state

    return lstm


def _torchs_own(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """Return what other devices run for ``op`` under autograd: torch's formula, or its composition of others."""
    formula = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "Autograd")
    return functools.partial(op._op_dk, DispatchKey.Autograd if formula else DispatchKey.CompositeImplicitAutograd)


def _registered(key: str, namespace: str = "aten") -> set[str]:
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix(f"{namespace}::") for name in names if name.startswith(f"{namespace}::")}


def _overload(name: str) -> Any:
    """Look up the operator of that name; None for the names that torch_npu registers and aten does not have."""
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base, None), overload or "default", None)


def _runs_on_host(op: torch._ops.OpOverload) -> bool:
    composite = "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd"
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key) for key in ("CPU", *composite))


def _is_view(op: torch._ops.OpOverload) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)
