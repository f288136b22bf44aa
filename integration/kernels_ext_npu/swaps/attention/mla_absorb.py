"""Weight absorption of multi-head latent attention (MLA): few queries attend to the latents in the cache directly.

Models expand the whole cache by `kv_b_proj` for each token. Here keys and values are tensors without memory until
attention has its queries. If these are few, `kv_b_proj` is multiplied into the queries and the result instead, and all
heads attend to the latents as to one key. Any other reader of these tensors gets the expanded keys and values.

Latents are ``[B, 1, S_k, R]``, the part of keys that is rotated ``[B, 1, S_k, R_r]``, queries ``[B, N, S_q, D + R_r]``,
the weight of `kv_b_proj` ``[N * (D + D_v), R]``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils._pytree import tree_map_only

from kernels_ext_npu.binding.named_implementation import NPU_FLASH_ATTENTION
from kernels_ext_npu.matching.fingerprint import computes_as
from kernels_ext_npu.module_state import has_hooks
from kernels_ext_npu.swaps.attention import eligibility, indexers
from kernels_ext_npu.swaps.attention.head_products import HeadProducts
from kernels_ext_npu.swaps.linear.plain_linear import why_not_plain
from kernels_ext_npu.transformers_internals import cells

_TP_FORWARD = "transformers.distributed.tensor_parallel", "TensorParallelLayer.install_forward.<locals>.tp_forward"
_GATHERED = 4  # how many times a product counts whose keys are gathered first
_AT_A_TIME = 1024  # queries with keys of their own that are computed at once
_NEEDS_EXPANDED_KEYS = (
    "cache",
    "cu_seq_lens_q",
    "output_attentions",
    "position_bias",
    "softcap",
)  # options of attention


@functools.cache
def replacement_for(cls: type, method: FunctionType) -> Callable | None:
    """Return the replacement for a method that expands latents as DeepSeek's does; None for any other method."""
    return _expand if computes_as(method, _as_in_deepseek) else None


class Unexpanded(Tensor):
    """Keys or values of MLA that are expanded when somebody reads them."""

    latents: Latents  # what they are expanded from
    place: int  # 0 for keys, 1 for values

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in _SHOW:
            args, kwargs = tree_map_only(Unexpanded, expanded, (args, kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(Unexpanded, expanded, (args, kwargs or {}))
        return function(*args, **kwargs)


_SHOW = {getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "requires_grad", "ndim", "is_cuda")}
_SHOW |= {Tensor.size, Tensor.dim, Tensor.is_floating_point}


@dataclass
class Latents:
    """Holds what keys and values are expanded from, and the expanded ones once somebody has read them."""

    module: Any
    nope: Tensor
    rope: Tensor
    weight: Tensor  # that of `kv_b_proj`; a DTensor under tensor parallelism, with the rows of this rank's heads
    original: Callable
    has_gradient: bool
    dtype: torch.dtype  # the dtype of keys and values: that of autocast, or of the cache

    @functools.cached_property
    def made(self) -> tuple[Tensor, Tensor]:
        """Keys and values, expanded as the model does; with gradients also if they are first read under no_grad."""
        with torch.set_grad_enabled(self.has_gradient):
            return self.original(self.module, self.nope, self.rope)

    @functools.cached_property
    def cast(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return latents, the rotated part and the weight ``[N, D + D_v, R]`` in the dtype of keys and values."""
        with torch.set_grad_enabled(self.has_gradient):
            nope, rope, weight = self.nope, self.rope, self.weight
            if isinstance(weight, DTensor):  # the gradient of latents is a sum over all heads; rope has its own
                whole = DTensor.from_local(nope, weight.device_mesh, [Replicate()], run_check=False)
                nope, weight = whole.to_local(grad_placements=[Partial()]), weight.to_local()
            nope, rope, weight = (tensor.to(self.dtype) for tensor in (nope, rope, weight))
            return nope, rope, weight.unflatten(0, (-1, self.module.qk_nope_head_dim + self.module.v_head_dim))

    def is_cheaper(self, queries: int) -> bool:
        """Tell whether absorbing takes fewer products than expanding the keys.

        Per head, a key is R * (D + D_v) products to expand, and as many is a query to absorb; a query and a key then
        are 2 * R products on latents, where they are D + D_v.
        """
        size, rank, keys = self.module.qk_nope_head_dim + self.module.v_head_dim, *self.nope.shape[:1:-1]
        return queries * (rank * size + keys * (2 * rank - size)) < keys * rank * size

    def is_cheaper_for_chosen(self, queries: int, count: int, gathered: bool) -> bool:
        """Tell whether absorbing takes fewer products where each query attends to ``count`` keys of its own.

        Where keys are gathered for them, each product counts `_GATHERED` times: every key is read, written and read
        twice for one query.
        """
        size, rank, keys = self.module.qk_nope_head_dim + self.module.v_head_dim, *self.nope.shape[:1:-1]
        rope = self.rope.shape[-1]
        chosen = queries * (rank * size + (_GATHERED if gathered else 1) * count * (2 * rank + rope))
        return count < keys and chosen < keys * rank * size + queries * keys * (size + rope)

    def attend(self, attend: Callable[..., Tensor], query: Tensor) -> Tensor:
        """Attend to latents as to one key head, and return ``[B, S_q, N, D_v]``.

        ``attend`` takes absorbed queries, the latents as keys and as values, and the rotated parts of both; it returns
        ``[B, S_q, N, R]``.
        """
        nope, rope, _ = self.cast
        absorbed, rotated, by_head = self.absorb(query)
        return _expand_values(attend(absorbed, nope, nope, (rotated, rope)), by_head)

    def attend_chosen(
        self, attend: Callable[..., Tensor], query: Tensor, mask: Any, indices: Tensor, *options: Any
    ) -> Tensor:
        """Attend to chosen keys, some queries at a time, since absorbed queries are larger; return as `attend` does."""
        parts, (latents, rope) = [], (tensor[:, 0] for tensor in self.cast[:2])
        for begin in range(0, query.shape[2], _AT_A_TIME):
            end = min(begin + _AT_A_TIME, query.shape[2])
            rows = mask
            if end - begin < query.shape[2]:
                rows = mask[:, :, begin:end] if isinstance(mask, Tensor) else mask.mask_slice(begin, end)
            absorbed, rotated, by_head = self.absorb(query[:, :, begin:end])
            few = torch.cat((absorbed, rotated), dim=-1).transpose(1, 2)
            parts.append(_expand_values(attend(few, latents, rope, indices[:, begin:end], rows, *options), by_head))
        return torch.cat(parts, dim=1)

    def absorb(self, query: Tensor) -> tuple[Tensor, Tensor, HeadProducts]:
        """Return absorbed queries, ``[B, N, S_q, R]``, their rotated part, and the products that expand their sums."""
        split, query = self.module.qk_nope_head_dim, query.to(self.dtype)
        by_head = HeadProducts(self.cast[2], split, query)
        absorbed = by_head.absorb(query[..., :split].transpose(0, 1).flatten(1, 2))
        return absorbed.unflatten(1, (len(query), -1)).transpose(0, 1), query[..., split:], by_head


def _expand_values(result: Tensor, by_head: HeadProducts) -> Tensor:
    """Expand sums of latents, ``[B, S_q, N, R]``, to sums of values, ``[B, S_q, N, D_v]``."""
    values = by_head.expand_values(result.permute(2, 0, 1, 3).flatten(1, 2))
    return values.unflatten(1, (len(result), -1)).permute(1, 2, 0, 3).contiguous()


def expanded(tensor: Tensor) -> Tensor:
    """Return the expanded keys or values; any other tensor as it is."""
    return tensor.latents.made[tensor.place] if type(tensor) is Unexpanded else tensor


def latents_for_few_queries(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Latents | None:
    """Return the latents to absorb into for few queries; None where keys are to be expanded."""
    latents = _absorbable(key, value, options)
    if latents is None or latents.has_gradient or not latents.is_cheaper(query.shape[2]):
        return None
    return latents


def latents_for_chosen_keys(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any], read_in_place: Callable[..., bool]
) -> Latents | None:
    """Return the latents to absorb into where queries attend to chosen keys; None where keys are to be expanded."""
    latents, indices = _absorbable(key, value, options), options.get("indices")
    if latents is None or indices is None or mask is None or options.get("dropout"):
        return None
    is_plain = not isinstance(mask, Tensor) or (mask.dim() == 4 and mask.shape[1] == 1 and not mask.requires_grad)
    in_place = options.get("s_aux") is None and not latents.has_gradient
    if in_place:
        nope, rope, _ = latents.cast
        in_place = read_in_place(query.to(latents.dtype).transpose(1, 2), nope[:, 0], rope[:, 0])
    is_cheaper = latents.is_cheaper_for_chosen(query.shape[2], indices.shape[-1], not in_place)
    return latents if is_plain and is_cheaper else None


def _absorbable(key: Tensor, value: Tensor, options: dict[str, Any]) -> Latents | None:
    """Return the latents of keys and values; None if they have none, or an option needs expanded keys."""
    if type(key) is not Unexpanded or type(value) is not Unexpanded or key.latents is not value.latents:
        return None
    asked = [name for name in _NEEDS_EXPANDED_KEYS if options.get(name) is not None and options[name] is not False]
    is_scaled = options.get("scaling") is not None  # by default the scale is that of expanded keys
    return key.latents if is_scaled and not asked else None


def _expand(original: Callable, self: Any, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    if torch.compiler.is_compiling():
        return original(self, kv_nope, k_rot)
    weight, device = _plain_weight(self.kv_b_proj), kv_nope.device.type
    size = self.qk_nope_head_dim + self.v_head_dim
    has_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in (weight, kv_nope, k_rot) if t is not None)
    is_cast = torch.is_autocast_enabled(device)
    if (
        weight is None
        or (rows := len(weight.to_local() if isinstance(weight, DTensor) else weight)) % size
        or not (is_cast or weight.dtype == kv_nope.dtype == k_rot.dtype)
        or (has_gradient and not indexers.hands_on(self))
        or not (NPU_FLASH_ATTENTION.is_named_by(self.config) or eligibility.serves_config(self.config))
        or eligibility.refusal(self, device, kv_nope.dtype, None) is not None
    ):
        return original(self, kv_nope, k_rot)
    dtype = torch.get_autocast_dtype(device) if is_cast else kv_nope.dtype
    latents = Latents(self, kv_nope, k_rot, weight, original, has_gradient, dtype)
    sizes = self.qk_nope_head_dim + k_rot.shape[-1], self.v_head_dim
    return _unexpanded(latents, rows // size, 0, sizes[0]), _unexpanded(latents, rows // size, 1, sizes[1])


def _plain_weight(layer: Any) -> Tensor | None:
    """Return the weight of a layer whose call is one product and nothing else; None of any other layer.

    A rank of transformers' tensor parallelism has the rows of its heads, of a DTensor.
    """
    if layer.bias is not None:
        return None
    if why_not_plain(layer) is None:
        return layer.weight
    weight, forward = layer._parameters.get("weight"), vars(layer).get("forward")
    is_rank = isinstance(weight, DTensor) and weight.placements == (Shard(0),) and type(layer) is torch.nn.Linear
    return weight if is_rank and not has_hooks(layer) and _is_colwise_parallel(forward) else None


def _is_colwise_parallel(forward: Any) -> bool:
    """Tell whether the forward of an instance is what ColwiseParallel of transformers puts around that of its class."""
    if (getattr(forward, "__module__", None), getattr(forward, "__qualname__", None)) != _TP_FORWARD:
        return False
    held: dict[str, Any] = cells(forward)
    style, inside = held["self"], held["original_forward"]
    return (
        type(style).__name__ == "ColwiseParallel"
        and style.use_local_output
        and style.input_layouts == Replicate()
        and style.output_layouts == Shard(-1)
        and getattr(inside, "__func__", None) is torch.nn.Linear.forward
    )


def _unexpanded(latents: Latents, heads: int, place: int, size: int) -> Unexpanded:
    like = latents.nope
    make: Any = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
    made = make(Unexpanded, (len(like), heads, like.shape[2], size), dtype=latents.dtype, device=like.device)
    made.latents, made.place = latents, place
    return made


def _as_in_deepseek(self, kv_nope, k_rot):
    """Expand latents as DeepseekV3Attention.expand_kv does, and the 15 others that transformers 5.22.2 has."""
    batch_size, _, seq_length, _ = kv_nope.shape
    key_shape = (batch_size, seq_length, -1, self.qk_nope_head_dim + self.v_head_dim)
    kv_nope = self.kv_b_proj(kv_nope).view(key_shape).transpose(1, 2)
    k_nope, value_states = torch.split(kv_nope, [self.qk_nope_head_dim, self.v_head_dim], dim=-1)
    k_rot = k_rot.expand(-1, k_nope.shape[1], -1, -1)
    key_states = kv_nope.new_empty(*kv_nope.shape[:-1], self.qk_nope_head_dim + self.qk_rope_head_dim)
    key_states[..., : self.qk_nope_head_dim].copy_(k_nope)
    key_states[..., self.qk_nope_head_dim :].copy_(k_rot)
    return key_states, value_states
