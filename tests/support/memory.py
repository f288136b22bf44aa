"""Read the memory of a training step from torch_npu's allocator, or the largest tensor that an operator gives."""

import gc

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel


def peak(model: PreTrainedModel, ids: torch.Tensor) -> int:
    """Measure the bytes that a forward and backward add to what a causal language model holds with its gradients."""
    for measured in (False, True):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        before = start()
        model.model(ids, use_cache=False).last_hidden_state.sum().backward()
        if measured:
            return requested("peak") - before
    raise AssertionError


def start() -> int:
    """Return the bytes that are held, without what an earlier model left in a cycle; from here on a new peak counts."""
    gc.collect()
    torch.npu.reset_peak_memory_stats()
    return requested("current")


def requested(when: str) -> int:
    """Return the bytes that were asked for: blocks are larger, by what was free beside them."""
    return torch.npu.memory_stats()[f"requested_bytes.all.{when}"]


class Largest(TorchDispatchMode):
    """Holds how many elements and bytes the largest tensors have that operators give."""

    elements = bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.elements, self.bytes = max(self.elements, leaf.numel()), max(self.bytes, leaf.nbytes)
        return result
