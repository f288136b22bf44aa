"""Carry one operator call to the host: NPU tensors go in as CPU tensors over the same bytes, and results come back."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import torch
from torch_npu import npu

CPU = torch.device("cpu")


class OnHost(NamedTuple):
    """Mark a result that the real operator leaves in the host's memory."""

    tensor: torch.Tensor


class HostCall:
    """Hold the tensors of one operator call, on both sides.

    ``enter`` turns arguments into their host form, ``leave`` turns what the host operator returned into NPU
    tensors. A returned argument is the caller's own tensor again, everything else is copied into a fresh NPU tensor:
    operators whose schema says that they return views stay torch_npu's own. Results are contiguous if they are asked
    to be, as op-plugin allocates them, though torch's meta kernels may report other strides.

    A call that borrows does not keep the bytes of the device alive: somebody else does, until they are no longer used.
    """

    __slots__ = ("borrows", "contiguous", "device", "memory", "name", "of_the_host", "originals")

    def __init__(self, name: str, contiguous: bool = False, borrows: bool = False) -> None:
        self.name = name
        self.contiguous = contiguous
        self.borrows = borrows
        self.device: torch.device | None = None
        self.memory: dict[int, HostMemory] = {}  # by address on the device
        self.originals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.of_the_host: torch.Tensor | None = None  # the first argument that no launch can take along

    def enter(self, value: Any) -> Any:
        """Turn an argument into what the host's operator takes."""
        if isinstance(value, torch.Tensor):
            if value.get_device() >= 0:
                return self.alias(value)
            if self.of_the_host is None and value.dim():
                self.of_the_host = value
            return value
        if isinstance(value, (list, tuple)):
            return [self.enter(item) for item in value]
        if isinstance(value, torch.device) and value.type == "npu":
            self.device = value
            return CPU
        return value

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make a CPU tensor over the bytes of an NPU tensor. It keeps them alive unless the call borrows them."""
        if self.device is None or self.device.index is None:
            self.device = tensor.device
        elif tensor.device != self.device and self.name not in CROSS_DEVICE:
            raise mixed_devices(self.name, self.device, tensor.device)
        if tensor.layout != torch.strided:
            raise NotImplementedError(f"{self.name}: the software device has no {tensor.layout} form of this operator")
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if size == 0:
            host = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
        else:
            address = storage.data_ptr()
            memory = self.memory.get(address)
            if memory is None:
                memory = _borrowed_memory(address, size) if self.borrows else HostMemory(address, size, storage)
                self.memory[address] = memory
            host = memory.under(tensor)
        if tensor.requires_grad:
            host.needs_gradient = True  # type: ignore[attr-defined]
        self.originals[id(host)] = host, tensor
        return host

    def leave(self, value: Any) -> Any:
        """Turn a result of the host's operator into what the device returns."""
        if isinstance(value, torch.Tensor):
            if not value.is_cpu:
                return value
            host, original = self.originals.get(id(value), (None, None))
            return original if host is value else self.result(value)
        if isinstance(value, OnHost):
            return value.tensor
        if isinstance(value, (list, tuple)):
            return type(value)([self.leave(item) for item in value])
        return value

    def result(self, host: torch.Tensor) -> torch.Tensor:
        """Copy a tensor of the host into a new NPU tensor."""
        device = self.device or torch.device("npu", npu.current_device())
        if host.layout != torch.strided:
            return host.to(device)
        host = host.resolve_conj().resolve_neg()
        host = host.contiguous() if self.contiguous else host
        fresh = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=device)
        if host.numel():
            if host.is_contiguous():  # in a third of the time of a copy between tensors
                ctypes.memmove(fresh.data_ptr(), host.data_ptr(), host.nbytes)
                return fresh
            storage = fresh.untyped_storage()
            _borrowed_memory(storage.data_ptr(), storage.nbytes()).under(fresh).copy_(host)
        return fresh

    def write_back(self, host: Any) -> None:
        """Give the NPU tensor behind ``host``, an argument that was written to, the shape that the host gave it."""
        if id(host) not in self.originals:
            return
        original = self.originals[id(host)][1]
        own_bytes = original.untyped_storage().nbytes() and host.untyped_storage().data_ptr() in self.memory
        if own_bytes:
            if original.size() != host.size() or original.stride() != host.stride():
                _reshape(original, host)
            return
        if original.size() != host.size():
            original.resize_(host.size())
            _reshape(original, host)
        if host.numel():
            call = HostCall(self.name, borrows=True)
            target = call.alias(original)
            if original.untyped_storage().nbytes() and target.untyped_storage().data_ptr() not in call.memory:
                raise RuntimeError(f"{self.name}: the argument that it writes to ends behind its storage")
            target.copy_(host)

    def let_go(self) -> list[torch.UntypedStorage]:
        """Let go of the caller's tensors, and return the storages whose bytes are used."""
        storages = [original.untyped_storage() for _, original in self.originals.values()]
        self.originals = {key: (host, host) for key, (host, _) in self.originals.items()}
        return list({storage.data_ptr(): storage for storage in storages if storage.nbytes()}.values())

    def stand_in(self, host: torch.Tensor, strided: bool) -> torch.Tensor:
        """Make memory to write to in place of an argument's, which ``write_back`` copies to the argument."""
        fresh = (
            torch.empty_strided(host.size(), host.stride(), dtype=host.dtype)
            if strided
            else torch.empty_like(host, memory_format=torch.contiguous_format)
        )
        self.originals[id(fresh)] = fresh, self.originals[id(host)][1]
        return fresh


def _reshape(original: torch.Tensor, host: torch.Tensor) -> None:
    """Set the shape, not by ``as_strided_``: torch_npu 2.6 gives none back below autograd, and Python crashes."""
    original.set_(original.untyped_storage(), host.storage_offset(), host.size(), host.stride())


# operators that exist to take tensors of two devices
CROSS_DEVICE = {"copy_", "_copy_from", "_copy_from_and_resize", "_to_copy"}


def mixed_devices(name: str, first: torch.device | None, second: torch.device) -> RuntimeError:
    """Make the error that torch raises for tensors on two devices, and torch_npu for one of the host among them."""
    expected = "Expected all tensors to be on the same device"
    if second.type == "cpu":  # NpuUtils.cpp
        expected += ". Expected NPU tensor, please check whether the input tensor device is correct"
    return RuntimeError(f"{expected}, but found at least two devices, {first} and {second}! (in the operator {name})")


def needs_gradient(host: torch.Tensor) -> bool:
    """Tell whether the caller's tensor requires a gradient, which some operators ask."""
    return getattr(host, "needs_gradient", False)


class HostMemory:
    """Be the bytes of a storage of the device on the host. The owner, if there is one, lives as long as its tensors."""

    __slots__ = ("_flat", "_storage")

    def __init__(self, address: int, size: int, owner: torch.UntypedStorage | None = None) -> None:
        block = (ctypes.c_char * size).from_address(address)
        block.owner = owner  # type: ignore[attr-defined]
        self._storage = torch.frombuffer(block, dtype=torch.uint8).untyped_storage()
        self._flat: dict[torch.dtype, torch.Tensor] = {}

    def under(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make a CPU tensor over the bytes of a tensor of the device."""
        flat = self._flat.get(tensor.dtype)
        if flat is None:
            with torch.inference_mode(False):  # it serves all modes
                flat = self._flat[tensor.dtype] = torch.empty(0, dtype=tensor.dtype).set_(self._storage)
        try:
            host = flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        except RuntimeError:  # the storage was shrunk below what the tensor spans
            host = self._enlarged(tensor)
        # bits that are not in the bytes
        if tensor.is_conj():
            torch._C._set_conj(host, True)
        if tensor.is_neg():
            torch._C._set_neg(host, True)
        return host

    def _enlarged(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of the tensor with NaN, or -1, behind the end of the storage."""
        last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride()))
        larger = torch.full(((tensor.storage_offset() + last + 1) * tensor.element_size(),), 255, dtype=torch.uint8)
        larger[: self._storage.nbytes()] = torch.empty(0, dtype=torch.uint8).set_(self._storage)
        return larger.view(tensor.dtype).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


# Addresses come again and again. An entry says nothing of who uses the bytes: its storage does not own them.
_borrowed_memory = functools.lru_cache(maxsize=4096)(HostMemory)
