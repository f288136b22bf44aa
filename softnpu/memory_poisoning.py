"""Fill fresh memory with NaN, on demand, in place of whatever the allocator's block held before.

A kernel that reads what nobody wrote is right by luck as long as blocks come back clean. With the switch on,
every fresh allocation is filled with bytes of ones: NaN for floating dtypes, -1 or the largest number for integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from softnpu.host_call import HostCall
from softnpu.kernel_registration import replace_kernel

ONES = 0xFF

active = False


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill every fresh allocation on the device with NaN while the context is open."""
    global active
    library = torch.library.Library("aten", "IMPL")
    before, active = active, True
    for name, kernel in _KERNELS.items():
        replace_kernel(library, name, kernel)
    try:
        yield
    finally:
        active = before
        library._destroy()  # torch_npu's own kernels serve again


def _allocate(
    size: list[int], stride: list[int], dtype: torch.dtype | None, device: torch.device | None
) -> torch.Tensor:
    """Allocate through the operator that torch_npu's own kernels, replaced here, end in, and fill what comes back."""
    elements = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride))
    flat = torch.ops.npu.empty_with_format([elements], dtype=dtype, device=device or torch.device("npu"), acl_format=2)
    _fill(flat)
    return flat.as_strided(size, stride)


def _fill(tensor: torch.Tensor) -> None:
    if tensor.numel():
        HostCall("empty").alias(tensor).view(torch.uint8).fill_(ONES)


def _empty(size: list[int], **options: Any) -> torch.Tensor:
    layout = options.get("memory_format") or torch.contiguous_format
    stride = torch.empty(size, device="meta", memory_format=layout).stride()
    return _allocate(size, list(stride), options.get("dtype"), options.get("device"))


def _empty_strided(size: list[int], stride: list[int], **options: Any) -> torch.Tensor:
    return _allocate(size, stride, options.get("dtype"), options.get("device"))


def _new_empty_strided(self: torch.Tensor, size: list[int], stride: list[int], **options: Any) -> torch.Tensor:
    return _allocate(size, stride, options.get("dtype") or self.dtype, options.get("device") or self.device)


def _empty_like(self: torch.Tensor, **options: Any) -> torch.Tensor:
    shape = torch.empty_strided(self.size(), self.stride(), device="meta")
    shape = torch.empty_like(shape, memory_format=options.get("memory_format") or torch.preserve_format)
    return _new_empty_strided(self, list(shape.size()), list(shape.stride()), **options)


def _resize_(self: torch.Tensor, size: list[int], *, memory_format: torch.memory_format | None = None) -> torch.Tensor:
    stride = torch.empty(size, device="meta", memory_format=memory_format or torch.contiguous_format).stride()
    elements = 0 if 0 in size else math.prod(size)
    storage = self.untyped_storage()
    before, after = storage.nbytes(), (self.storage_offset() + elements) * self.element_size()
    if elements and after > before:
        storage.resize_(int(after))
        grown = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage, before, (after - before,), (1,))
        _fill(grown)
    return self.set_(self.untyped_storage(), self.storage_offset(), size, stride)


_KERNELS: dict[str, Callable] = {
    "empty.memory_format": _empty,
    "empty_like": _empty_like,
    "empty_strided": _empty_strided,
    "new_empty_strided": _new_empty_strided,
    "resize_": _resize_,
}
