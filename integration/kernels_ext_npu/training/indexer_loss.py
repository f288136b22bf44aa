"""The loss of lightning indexers in training: of each layer, added to the model's own.

transformers computes indexers without gradients. Here the forward of an indexer keeps its query, key and weights, made
of detached inputs, and the attention around it compares them with what it pays: ``indexer_loss`` of the kernel. Hooks
on the model add the sum over layers to its loss. A layer that is computed again for its gradient computes its loss
again, too, which nobody adds.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from kernels_ext_npu.binding.devices import check_is_module
from kernels_ext_npu.swaps.attention import indexers, mla_absorb
from kernels_ext_npu.syntax.indexers import indexer_rewriter

_NO_BACKWARD = -1
_AT_A_TIME = 1024  # absorbed queries in memory
_REENTRANT = (
    "a layer was computed without gradients in a forward with them; gradient checkpointing needs "
    'gradient_checkpointing_kwargs={"use_reentrant": False}'
)
_NOT_SERVED = (
    "the kernel computed no indexer in this forward: it was compiled, not on the NPU, asked for weights of attention, "
    "or its sequences are split over cards; remove() ends the training of indexers"
)
_PASSED_BY = (
    "a layer was computed, but the forward of the module that train_indexer() was called for was not; "
    "call it for the module that your loop calls"
)
_SPLIT = "heads are split over cards, and attention is summed over all of them: tensor parallelism is not served"


def train_indexer(model: nn.Module, coefficient: float = 1.0, dense: bool = False) -> IndexerTraining:
    """Train the indexers of a model with sparse attention: add their loss to the model's, while it is in training.

    It is the KL divergence of the softmax of an indexer's scores from the attention of its layer, the mean over tokens
    and the sum over layers (DeepSeek-V3.2, section 2.1). Only indexers get gradients from it, and they get no others.

    Args:
        model: a model on the NPU that :func:`kernelize` was called for, such as one of ``deepseek_v32`` or
            ``glm_moe_dsa``; or a module around it that returns its output.
        coefficient: the factor of the loss.
        dense: whether attention and loss are about all keys, as in the warm-up, rather than about the chosen ones.

    Returns:
        An object whose ``loss`` is that of the last forward in training, before the factor. A forward without labels
        has no loss to add to: there it has its gradient, and a loop of your own adds it. ``remove()`` ends the
        training, as :func:`restore` does.

    Raises:
        TypeError: it is no module.
        ValueError: the kernel does not compute an indexer of the model, or they are trained already.

    Example:
        >>> import softnpu  # before torch, on a machine without an NPU
        >>> import torch
        >>> import kernels_ext_npu
        >>> from transformers import DeepseekV32Config, DeepseekV32ForCausalLM
        >>> config = DeepseekV32Config(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=1)
        >>> model = kernels_ext_npu.kernelize(DeepseekV32ForCausalLM(config).to("npu")).train()
        >>> training = kernels_ext_npu.train_indexer(model, coefficient=0.1)
        >>> ids = torch.arange(16, device="npu").unsqueeze(0)
        >>> model(ids, labels=ids).loss.backward()  # or Trainer(model, ...).train()
        >>> training.loss.item() > 0, model.model.layers[0].self_attn.indexer.wk.weight.grad is not None
        (True, True)
        >>> training.remove()
    """
    check_is_module("train_indexer", model)
    attending = [module for module in model.modules() if isinstance(module._modules.get("indexer"), nn.Module)]
    if not attending or not all(map(indexers.hands_on, attending)):
        raise ValueError(
            "train_indexer: the kernel computes no indexer of this model, or not all of them; "
            "call kernels_ext_npu.kernelize(model) first, and see kernels_ext_npu.report(model)"
        )
    if any(indexers.TRAINING in vars(module) for module in attending):
        raise ValueError("train_indexer: the indexers of this model are trained already; call remove() first")
    return IndexerTraining(model, attending, coefficient, dense)


class IndexerTraining:
    """Holds the loss of the last forward, and ends what :func:`train_indexer` began."""

    def __init__(self, model: nn.Module, attending: list[nn.Module], coefficient: float, dense: bool) -> None:
        self.coefficient, self.dense = coefficient, dense
        self.loss: Tensor | None = None
        self._losses: list[Tensor] | None = None  # of the layers of a forward; None outside of one
        self._padding: Tensor | None = None
        self._projected: dict[nn.Module, tuple] = {}
        self._modules: list[nn.Module] = [*attending, *(module.get_submodule("indexer") for module in attending)]
        for module in self._modules:
            setattr(module, indexers.TRAINING, self)
        self._handles = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._add, with_kwargs=True),
        ]

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what a forward left: a copy of the model trains its own indexers."""
        return vars(self) | {"loss": None, "_losses": None, "_padding": None, "_projected": {}}

    def remove(self) -> None:
        """Leave the model as it was."""
        for handle in self._handles:
            handle.remove()
        for module in self._modules:
            vars(module).pop(indexers.TRAINING, None)
        self._projected.clear()
        self.loss = None

    def check_gradients(self) -> None:
        """Raise RuntimeError where a layer is computed without gradients in a forward that has them."""
        if self._losses is not None and not torch.is_grad_enabled():
            raise RuntimeError(f"train_indexer: {_REENTRANT}")

    def choose(self, kernel: Any, indexer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        """Compute the forward of an indexer, and keep what its scores are made of."""
        given: list[tuple] = []
        make: Any = indexer_rewriter(type(indexer))
        forward = inspect.unwrap(make(lambda *projected: given.append(projected)))  # below its no_grad
        forward(indexer, *map(_detached, args), **{name: _detached(value) for name, value in kwargs.items()})
        ((query, key, weights, mask, count, scale),) = given
        self._projected[indexer] = query, key, weights, scale
        with torch.no_grad():
            return kernel.top_k_keys(query, key, weights, mask, key.shape[1] if self.dense else count, scale)

    def compare(self, kernel: Any, module: Any, query: Tensor, key: Tensor, mask: Any, options: dict[str, Any]) -> None:
        """Compute the loss of a layer from its attention: of ``[B, N, S_q, D]`` and ``[B, N, S_k, D]``."""
        projected = self._projected.pop(module.indexer, None)
        if projected is None:  # the indexer was not computed by the kernel
            return
        if self._losses is None and torch._C._current_graph_task_id() == _NO_BACKWARD:  # nor is it computed again
            raise RuntimeError(f"train_indexer: {_PASSED_BY}")
        if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            raise RuntimeError(f"train_indexer: {_SPLIT}")
        *indexer, index_scale = projected
        if isinstance(mask, Tensor) and mask.is_floating_point():  # it is added to scores
            mask = mask == 0
        indices = None if self.dense else options["indices"]
        if indices is not None and indices.shape[-1] >= key.shape[2]:
            indices = None
        scale, queries, loss = options["scaling"], query.shape[2], torch.zeros((), device=query.device)
        counted, tokens = self._counted(mask, query, key.shape[2])
        with torch.no_grad():
            latents = key.latents if type(key) is mla_absorb.Unexpanded and indices is not None else None
            if latents is None:
                keys = mla_absorb.expanded(key).transpose(1, 2)
            else:
                nope, rope, _ = latents.cast
                keys = torch.cat((nope, rope), dim=-1).transpose(1, 2)
        for begin in range(0, queries, _AT_A_TIME):
            end = min(begin + _AT_A_TIME, queries)
            block = slice(begin, end)
            with torch.no_grad():
                part = query[:, :, block]
                if latents is not None:
                    part = torch.cat(latents.absorb(part)[:2], dim=-1)
            rows, reach = _rows(mask, begin, end, queries, keys.shape[1])
            loss = loss + kernel.indexer_loss(
                part.transpose(1, 2),
                keys[:, :reach],
                indexer[0][:, block],
                indexer[1][:, :reach],
                indexer[2][:, block],
                rows,
                scale,
                _within(indices, block, reach),
                index_scale,
                None if counted is None else counted[:, block],
            )
        if self._losses is not None:
            self._losses.append(loss / tokens)

    def _counted(self, mask: Any, query: Tensor, keys: int) -> tuple[Tensor | None, Any]:
        """Return which queries are tokens, None for all of them, and how many."""
        batch, queries = len(query), query.shape[2]
        if self._padding is None or (not isinstance(mask, Tensor) and mask.is_causal(queries, keys)):
            return None, batch * queries
        counted = self._padding[:, -queries:].to(query.device).bool()
        return counted, counted.sum(dtype=torch.int32).clamp(min=1)

    def _begin(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        padding = kwargs.get("attention_mask")
        self._padding = padding if isinstance(padding, Tensor) and padding.dim() == 2 else None
        self._losses, self.loss = [] if model.training and torch.is_grad_enabled() else None, None
        self._projected.clear()

    def _add(self, model: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        losses, self._losses = self._losses, None
        if losses is None:
            return output
        if not losses:
            raise RuntimeError(f"train_indexer: {_NOT_SERVED}")
        self.loss = torch.stack(losses).sum()
        labels = kwargs.get("labels")
        if labels is None:
            return output
        added, self.loss = self.coefficient * self.loss, self.loss.detach()
        if (among := kwargs.get("num_items_in_batch")) is not None:  # a step of several forwards: its share of tokens
            added = added * ((labels[..., 1:] != -100).sum(dtype=torch.int32) / among)
        if isinstance(output, tuple):
            return output[0] + added, *output[1:]
        output.loss = output.loss + added
        return output


def _detached(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_detached, value))
    return value.detach() if type(value) in (Tensor, nn.Parameter) else value


def _rows(mask: Any, begin: int, end: int, queries: int, keys: int) -> tuple[Any, int]:
    """Return the mask of some queries, and of how many keys it is."""
    if end - begin == queries:
        return mask, keys
    if isinstance(mask, Tensor):
        return mask[..., begin:end, :], keys
    if mask.is_causal(queries, keys) and (part := mask.slice_queries(begin, end)) is not None:
        return part, keys - queries + end
    return mask.mask_slice(begin, end), keys


def _within(indices: Tensor | None, block: slice, reach: int) -> Tensor | None:
    """Return what some queries chose among the first keys; None for all that they see.

    A query that sees fewer keys than are chosen has others beside, which its mask leaves out, also behind these.
    """
    if indices is None or indices.shape[-1] > reach:
        return None
    return indices[:, block].clamp(max=reach - 1)  # the last query alone sees the last key, and has no others
