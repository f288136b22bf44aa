"""The memory that a computation on fake tensors would take: what was made and still lives, and its largest sum."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from math import prod
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Memory:
    """The bytes of storages, each from the operator that makes it until nothing holds it."""

    def __init__(self) -> None:
        self.current = self.peak = 0  # the bytes that live, and the most that lived at once
        self._living: dict[int, int] = {}  # storage -> bytes

    def start(self) -> None:
        """Take what lives for what was there before."""
        self._living = dict.fromkeys(self._living, 0)
        self.current = self.peak = 0

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Do not count what was there before, nor what is counted elsewhere."""
        for tensor in tensors:
            storage = local(tensor).untyped_storage()
            self.current -= self._living.get(storage._cdata, 0)
            self._follow(storage, 0)

    def exclude_gradients(self, model: nn.Module) -> list:
        """Do not count the gradients of parameters, as soon as they are complete; returns the hooks that see to it."""
        return [
            parameter.register_post_accumulate_grad_hook(lambda p: self.exclude([p.grad]))
            for parameter in model.parameters()
            if parameter.requires_grad
        ]

    def add(self, tensors: Iterable[Tensor], workspace: int = 0) -> None:
        """Count what an operator gave, unless it is counted, and the workspace that it had until it ended."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device.type == "npu" and storage._cdata not in self._living:
                self.current += storage.nbytes()
                self._follow(storage, storage.nbytes())
        self.peak = max(self.peak, self.current + workspace)

    def resized(self) -> AbstractContextManager:
        """Follow storages that are given back, and taken again, as FSDP2 does with gathered weights."""
        original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> None:
            original(storage, size)
            self.current += size - self._living.get(storage._cdata, 0)
            self._follow(storage, size)
            self.peak = max(self.peak, self.current)

        return patch.object(torch.UntypedStorage, "resize_", resize_)

    def _follow(self, storage, size: int) -> None:
        if storage._cdata not in self._living:
            weakref.finalize(storage, self._end, storage._cdata).atexit = False
        self._living[storage._cdata] = size

    def _end(self, storage: int) -> None:
        self.current -= self._living.pop(storage)


def weight_bytes(module: nn.Module) -> int:
    """Return the bytes of the weights that a rank holds, with the scales of those in four bits."""
    parameters = list(module.parameters())
    held = [*parameters, *(tensor for parameter in parameters for tensor in _scales(parameter))]
    return sum(local(tensor).numel() * tensor.element_size() for tensor in held)


def parameter_count(module: nn.Module) -> int:
    """Return the number of parameters; one in four bits has as many as the weight that is made of it."""
    states = [(parameter, getattr(parameter, "quant_state", None)) for parameter in module.parameters()]
    return sum(parameter.numel() if state is None else prod(state.shape) for parameter, state in states)


def _scales(parameter: Tensor) -> list[Tensor]:
    """Return the scales that bitsandbytes keeps beside a parameter in few bits."""
    state: Any = getattr(parameter, "quant_state", None)
    if state is None:
        return []
    return [state.absmax] + ([state.state2.absmax] if state.nested else [])


def local(tensor: Tensor) -> Tensor:
    """Return what a rank holds of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
