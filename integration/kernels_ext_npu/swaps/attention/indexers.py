"""Lightning indexers whose scores the kernel computes in parts, and attention that gets indices in place of a mask."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache, DynamicCache

from kernels_ext_npu.binding import registration
from kernels_ext_npu.binding.named_implementation import NPU_FLASH_ATTENTION
from kernels_ext_npu.module_state import has_hooks
from kernels_ext_npu.swaps import refusals
from kernels_ext_npu.swaps.attention import eligibility
from kernels_ext_npu.syntax.indexers import hands_on_indices, indexer_rewriter
from kernels_ext_npu.transformers_internals import cache_in, cache_parameter

_LONG = 8192  # a prompt of more tokens is computed in parts
_AT_A_TIME = 1024  # tokens of a part
TRAINING = "_kernels_ext_npu_indexer_training"  # an attribute that train_indexer() sets on modules
_PER_CALL = (bool, int, float, str, type(None))  # types of arguments that are the same for every part


@functools.cache
def replacement_for(cls: type, forward: FunctionType) -> Callable | None:
    """Return the replacement for the forward of an indexer, or of a module that calls one; None for any other."""
    make, handing_on = indexer_rewriter(cls), hands_on_indices(cls)
    if make is not None:
        kernel = registration.package
        choose = make(lambda *args: kernel(NPU_FLASH_ATTENTION.repository).top_k_keys(*args))
        return functools.partial(_choose, choose)
    return None if handing_on is None else functools.partial(_hand_on, handing_on)


def is_indexer(module: nn.Module) -> bool:
    """Tell whether a module is an indexer whose forward is known."""
    return indexer_rewriter(type(module)) is not None


def refusal(module: nn.Module) -> str | None:
    """Return why an indexer computes all of its scores at once; None where the kernel computes them in parts."""
    config: Any = module.config
    if eligibility.KERNEL_DISABLED in vars(module):
        return refusals.NOT_ASKED_FOR
    if (away := refusals.elsewhere(module)) is not None or eligibility.uses_kernel(config):
        return away
    return f"the attention implementation {config._attn_implementation} was asked for"


def hands_on(module: nn.Module) -> bool:
    """Tell whether a module passes indices to attention, and the kernel computes that and any indexer of it."""
    if hands_on_indices(type(module)) is None or not _uses_kernel(module):
        return False
    indexer = module._modules.get("indexer")
    return indexer is None or (is_indexer(indexer) and _uses_kernel(indexer))


def trained_by(module: nn.Module) -> Any:
    """Return what trains the indexer of a module, or the module itself, in this call; None where nothing does.

    Raises:
        RuntimeError: it is trained, but its gradients are off, as in a reentrant checkpoint.
    """
    training = vars(module).get(TRAINING) if module.training else None
    if training is None:
        return None
    training.check_gradients()
    return training if torch.is_grad_enabled() else None


def remark(module: nn.Module) -> str | None:
    """Return that an indexer is trained; None where it is not."""
    training = vars(module).get(TRAINING)
    return training and f"trained by the loss of train_indexer(), times {training.coefficient:g}"


def end_training(module: nn.Module) -> None:
    """End the training of the indexers of a model of which this module is part, if there is one."""
    if (training := vars(module).get(TRAINING)) is not None:
        training.remove()


def without_unchosen(mask: Tensor, indices: Tensor) -> Tensor:
    """Return a mask, ``[B, 1, S_q, S_k]``, without the keys that were not chosen for a query."""
    chosen = torch.zeros(len(indices), *mask.shape[-2:], dtype=torch.uint8, device=mask.device)
    chosen = chosen.scatter_(-1, indices.long(), 1).bool().unsqueeze(1)
    return mask & chosen if mask.dtype == torch.bool else mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)


def _choose(ours: FunctionType, original: Callable, self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    if not (_is_on_npu(args, kwargs) and _uses_kernel(self)):
        return original(self, *args, **kwargs)
    if (training := trained_by(self)) is not None:
        return training.choose(registration.package(NPU_FLASH_ATTENTION.repository), self, args, kwargs)
    return ours(self, *args, **kwargs)


def _hand_on(ours: FunctionType, original: Callable, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    is_looked_at = kwargs.get("output_attentions", getattr(self.config, "output_attentions", False))
    if is_looked_at or not (_is_on_npu(args, kwargs) and hands_on(self)):
        return original(self, *args, **kwargs)
    parameters = inspect.unwrap(ours).__code__.co_varnames  # which begin with them
    named = dict(zip(parameters, (self, *args))) | kwargs
    return _in_parts(ours, **named) if _is_long(**named) else ours(self, *args, **kwargs)


def _is_long(
    self: nn.Module, hidden_states: Tensor, attention_mask: Any, position_embeddings: Any = None, **rest: Any
) -> bool:
    """Tell whether a prompt is computed in parts: it is long and causal, needs no gradients, and no hook watches."""
    parts = {"position_ids", "prev_topk_indices"}
    return (
        hidden_states.shape[1] > _LONG
        and not torch.is_grad_enabled()
        and isinstance(position_embeddings, tuple)
        and all(name in parts or isinstance(value, (Cache, *_PER_CALL)) for name, value in rest.items())
        and not isinstance(attention_mask, Tensor)
        and attention_mask.queries == hidden_states.shape[1]
        and attention_mask.slice_queries(0, _AT_A_TIME) is not None
        and not any(map(has_hooks, self.modules()))
    )


def _in_parts(
    forward: Callable,
    self: nn.Module,
    hidden_states: Tensor,
    attention_mask: Any,
    position_embeddings: tuple[Tensor, ...],
    position_ids: Tensor | None = None,
    prev_topk_indices: Tensor | None = None,
    **rest: Any,
) -> tuple:
    """Call a forward for one part of the tokens after the other, with the keys of earlier parts in a cache."""
    config: Any = self.config
    if cache_in(rest) is None:
        rest[cache_parameter(forward)] = DynamicCache(config=config)
    results = []
    for begin in range(0, hidden_states.shape[1], _AT_A_TIME):
        end = min(begin + _AT_A_TIME, hidden_states.shape[1])
        if position_ids is not None:
            rest["position_ids"] = position_ids[:, begin:end]
        if prev_topk_indices is not None:
            rest["prev_topk_indices"] = prev_topk_indices[:, begin:end]
        results.append(
            forward(
                self,
                hidden_states=hidden_states[:, begin:end],
                attention_mask=attention_mask.slice_queries(begin, end),
                position_embeddings=tuple([table[:, begin:end] for table in position_embeddings]),
                **rest,
            )
        )
    outputs, _, *indices = zip(*results)
    return torch.cat(outputs, dim=1), None, *(_join_padded(parts, attention_mask.keys) for parts in indices)


def _join_padded(indices: tuple[Tensor, ...], keys: int) -> Tensor:
    """Join the indices of parts: a part with fewer keys than are chosen is padded with the last key, which it masks."""
    width = max(part.shape[-1] for part in indices)
    return torch.cat([F.pad(part, (0, width - part.shape[-1]), value=keys - 1) for part in indices], dim=1)


def _is_on_npu(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Tell whether a call has its tokens on the NPU; under torch.compile masks stay, so that it is False."""
    given = args[0] if args else kwargs.get("hidden_states")
    return not torch.compiler.is_compiling() and isinstance(given, Tensor) and given.device.type == "npu"


def _uses_kernel(module: nn.Module) -> bool:
    """Tell whether the kernel computes the attention that a module's config names."""
    return (
        eligibility.uses_kernel(module.config)
        and eligibility.KERNEL_DISABLED not in vars(module)
        and registration.try_package(NPU_FLASH_ATTENTION.repository) is not None
    )
