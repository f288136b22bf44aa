"""The functions and masks that transformers calls by the name of an attention implementation.

The kernel FlashAttention is the implementation ``npu_flash_attention``, for who names it, and what ``sdpa`` means on
the NPU while kernels are registered; so does ``eager`` for models that transformers gives nothing better, unless
somebody named it. No config says so: what reads the name of an implementation, or wraps one, finds what it would
without kernels. Where the kernel does not serve, and on other devices, the function computes that was in its place,
from the mask that it would be given.

A batch is known to be packed by its positions, which transformers reads from the device for every mask of a forward.
Positions that nobody gave, which a model counts itself, are those of one sequence: here they are not looked at. Others
are handed on as they are, and the kernel reads them once a forward.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kernels_ext_npu.binding import registration
from kernels_ext_npu.swaps.attention import (
    context_parallel,
    flash_question,
    indexers,
    latents,
    serving,
    split_sequences,
)
from kernels_ext_npu.swaps.named_implementation import NPU_FLASH_ATTENTION
from kernels_ext_npu.transformers_internals import cache_parameter

_counts_itself: ContextVar[bool] = ContextVar("_counts_itself", default=False)


def npu_flash_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of a module: transformers calls this by the name in the module's config.

    The arguments are those of `attention_forward` of the kernel. ``output_attentions`` counts where nothing is packed.

    Returns:
        ``[B, S_q, N, D_v]``, and the weights ``[B, N, S_q, S_k]`` where they are asked for, otherwise None.

    Raises:
        ValueError: sequences are split between devices, and nobody exchanges keys or heads; or torch's context
            parallelism does, and more is asked for than it computes.
    """
    split_sequences.refuse_part(module, NPU_FLASH_ATTENTION.name)
    result = _attend(module, query, key, value, attention_mask, *args, **kwargs)
    if not kwargs.get("output_attentions") or kwargs.get("cu_seq_lens_q") is not None:
        return result, None
    # values that are one for one key each make the weights the result
    one_of_each = torch.eye(key.shape[2], dtype=value.dtype, device=value.device).expand(*key.shape[:2], -1, -1)
    return result, _attend(module, query, key, one_of_each, attention_mask, *args, **kwargs).transpose(1, 2)


def npu_flash_attention_mask(*args: Any, **kwargs: Any) -> Any:
    """Describe the mask of a forward: transformers calls this by the name in the model's config.

    The arguments are those of the masks in transformers' ``AttentionMaskInterface``.

    Raises:
        ValueError: torch's context parallelism splits sequences of which a model sees chunks.
    """
    if split_sequences.exchanges_keys():
        kwargs = context_parallel.of_whole(kwargs)
    if serving.is_eager_by_default(type(kwargs.get("config"))):  # its formula knows masks alone, whatever a module says
        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return registration.package(NPU_FLASH_ATTENTION.repository).attention_mask(*args, **kwargs)


def stand_in(
    original: Callable,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *args,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of a module that names ``sdpa`` or its own formula, or let that original compute it."""
    is_sdpa = original is sdpa_attention_forward
    config: Any = module.config
    is_described = not (attention_mask is None or isinstance(attention_mask, Tensor))
    is_served = (
        NPU_FLASH_ATTENTION.is_registered()
        and (is_sdpa or serving.stands_for_eager(config))
        and serving.refusal(module, query.device.type, query.dtype, kwargs.get("softcap")) is None
        and kwargs.get("position_bias") is None
        and not kwargs.get("output_attentions", getattr(config, "output_attentions", False))
        and (attention_mask is None or _fits(attention_mask, query, key, is_described, kwargs.get("cache")))
    )
    split_sequences.refuse_part(module, "sdpa" if is_sdpa else "eager", is_served)
    if is_served:
        if is_sdpa and attention_mask is None:
            key, value = _up_to_queries(module, query, key, value, kwargs.get("is_causal"))
        return _attend(module, query, key, value, attention_mask, *args, **kwargs), None
    if is_sdpa and split_sequences.exchanges_keys():
        split_sequences.refuse_mask(module, attention_mask)
    if (indices := kwargs.get("indices")) is not None and attention_mask is not None:  # which no original reads
        attention_mask = indexers.among(attention_mask.mask() if is_described else attention_mask, indices)
        is_described = False
    if is_sdpa:
        attention_mask = attention_mask.sdpa_mask(len(query)) if is_described else attention_mask
    elif attention_mask is not None:
        attention_mask = _as_added(attention_mask, query)
    if kwargs.get("cu_seq_lens_q") is not None and flash_question.gives_lengths(type(module)):
        # sequences lie one behind the other, and the file computes them one by one where it gives no lengths
        lengths = torch.diff(kwargs["cu_seq_lens_q"]).tolist()
        parts = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)))
        return torch.cat([original(module, *part, attention_mask, *args, **kwargs)[0] for part in parts], dim=1), None
    return original(module, query, key, value, attention_mask, *args, **kwargs)


def get_interface(original: Callable, self: AttentionInterface, implementation: str, default: Callable) -> Callable:
    """Return what a module calls for its attention, in place of ``get_interface`` of transformers' table.

    What stands in for a module's own formula is in no table, since transformers looks for none there.
    """
    found = original(self, implementation, default)
    return functools.partial(stand_in, found) if implementation == "eager" and found is default else found


def mask_standing_in(original: Callable, before: Callable | None = None) -> Callable:
    """Return what stands in for a mask function of transformers: on the NPU it describes the mask.

    Args:
        original: the mask function.
        before: what computed the attention of ``sdpa`` before ours: while it still does, it gets the masks of then.
    """

    @functools.wraps(original)
    def mask(*args: Any, **kwargs: Any) -> Any:
        given, config = kwargs.get("attention_mask"), kwargs.get("config")
        if given is not None and not isinstance(given, Tensor):  # that of the model around
            return given if serving.describes_masks(config) else given.mask()
        if split_sequences.exchanges_keys():
            kwargs = context_parallel.of_whole(kwargs)
            given = kwargs["attention_mask"]
        if (
            torch.device(kwargs.get("device", "cpu")).type == "npu"
            and serving.describes_masks(config)
            and ALL_ATTENTION_FUNCTIONS["sdpa"] is not before
            and not args
            and not getattr(config, "attn_logit_softcapping", None)
            and (given is None or len(given) == kwargs["batch_size"])
            and registration.try_package(NPU_FLASH_ATTENTION.repository) is not None
        ):
            return npu_flash_attention_mask(**kwargs)
        return original(*args, **kwargs)

    return mask


def attach_context_parallel_hooks(original: Callable, model: nn.Module) -> None:
    """Leave a model its masks, in place of accelerate's function of this name, where the kernel computes attention."""
    config = getattr(model, "config", None)
    if not (serving.describes_masks(config) or NPU_FLASH_ATTENTION.is_named_by(config)):
        original(model)


def reads_no_positions() -> bool:
    """Tell whether positions are not looked at; a graph cannot look at them anyway."""
    return NPU_FLASH_ATTENTION.is_registered() and not torch.compiler.is_compiling()


def call_model(original: Callable, self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """Call a model, in place of its ``__call__``, and note whether it counts positions itself.

    The innermost model makes the masks. One that somebody else has written may make the positions of packed sequences.
    """
    forward = inspect.unwrap(self.forward)
    is_known = getattr(forward, "__module__", "").startswith("transformers.")
    split_sequences.split_recurrences_of(self)
    split_sequences.refuse_unshifted(self, kwargs, sys._getframe(1))
    # tokens can be given without their name, and what follows them could be positions
    counts_itself = is_known and len(args) <= 1 and kwargs.get("position_ids") is None
    if counts_itself:
        split_sequences.refuse_own_positions(self)
    token = _counts_itself.set(counts_itself)
    try:
        return original(self, *args, **kwargs)
    finally:
        _counts_itself.reset(token)


def preprocess(
    original: Callable,
    config: Any,
    inputs_embeds: Tensor,
    attention_mask: Any,
    *args: Any,
    **kwargs: Any,
) -> tuple:
    """Prepare a mask, in place of ``_preprocess_mask_arguments`` of masking_utils, without a look at positions."""
    given = inspect.signature(original).bind(config, inputs_embeds, attention_mask, *args, **kwargs).arguments
    position_ids = given["position_ids"]
    is_standing_in = inputs_embeds.device.type == "npu" and serving.describes_masks(config)
    if not (is_standing_in or NPU_FLASH_ATTENTION.is_named_by(config)):
        return original(**given)
    is_done, mask, _, *sizes = original(**given | {"position_ids": None})
    if is_done and mask is None and not isinstance(attention_mask, Tensor):
        mask = attention_mask  # a description, with a paged cache, for which transformers 5.24 wants no mask
    packed = None
    if split_sequences.exchanges_keys() and not is_done:  # a mask that is made in both directions asks for no sequences
        mask = context_parallel.sequences(inputs_embeds, position_ids, attention_mask)
    elif split_sequences.are_split():
        pass  # positions of a part tell nothing of the whole
    elif (
        position_ids is not None
        and mask is None
        and given[cache_parameter(original)] is None
        and not _counts_itself.get()
    ):
        packed = _sequences(position_ids.expand(len(inputs_embeds), -1))
    return is_done, mask, packed, *sizes


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
) -> Tensor:
    if split_sequences.exchanges_keys() and (getattr(module, "is_causal", True) or kwargs.get("cu_seq_lens_q") is None):
        return context_parallel.attend(module, query, key, value, attention_mask, *args, **kwargs)
    split_sequences.refuse_sinks(query, kwargs.get("s_aux"))
    if kwargs.get("cu_seq_lens_q") is None:
        kwargs |= split_sequences.lengths_of_whole(module, query, kwargs.get("position_ids"))
    if attention_mask is None and serving.is_eager_by_default(type(getattr(module, "config", None))):
        kwargs["is_causal"] = False  # its formula leaves out what a mask says
    kernel = registration.package(NPU_FLASH_ATTENTION.repository)
    given = query, key, value, attention_mask, kwargs
    if (chosen := latents.of_chosen_keys(*given, kernel.reads_chosen_in_place)) is not None:
        options = kwargs["indices"], kwargs["scaling"], kwargs.get("s_aux")
        return chosen.attend_chosen(kernel.attend_chosen, query, attention_mask, *options)
    forward = kernel.attention_forward
    if (few := latents.of_few_queries(query, key, value, kwargs)) is not None:

        def on_latents(few_queries: Tensor, keys: Tensor, values: Tensor, rotated: tuple[Tensor, Tensor]) -> Tensor:
            return forward(module, few_queries, keys, values, attention_mask, *args, **kwargs, rotated=rotated)[0]

        return few.attend(on_latents, query)
    key, value = latents.expanded(key), latents.expanded(value)
    return forward(module, query, key, value, attention_mask, *args, **kwargs)[0]


def _up_to_queries(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, is_causal: bool | None
) -> tuple[Tensor, Tensor]:
    """Leave out the keys behind a prompt that came without a mask: a static cache, empty until then, has room there.

    transformers 5.22.2, integrations/sdpa_attention.py: the first query stands at the first key.
    """
    queries = query.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return (key[:, :, :queries], value[:, :, :queries]) if causal and 1 < queries < key.shape[2] else (key, value)


def _fits(mask: Any, query: Tensor, key: Tensor, is_described: bool, paged_cache: Any) -> bool:
    """Tell whether a mask is for these tensors: if not, transformers' own says what is wrong with it."""
    if is_described:
        return mask.fits(query.shape[2], key.shape[2])
    sizes = query.shape[:3]
    has_keys = paged_cache is not None or mask.shape[-1] == key.shape[2]  # of pages, which are read later
    return has_keys and mask.dim() == 4 and all(a in (1, b) for a, b in zip(mask.shape[:3], sizes))


def _as_added(mask: Any, query: Tensor) -> Tensor:
    """Return a mask as the formulas of models take it, floating and added to scores, of what is described or bool."""
    seen = mask if isinstance(mask, Tensor) else mask.mask(query.device)
    zero = torch.zeros((), dtype=query.dtype, device=query.device)
    return seen if seen.is_floating_point() else torch.where(seen, zero, torch.finfo(query.dtype).min)


def _sequences(positions: Tensor) -> Tensor:
    """Return which sequence each token belongs to, ``[B, S]``: a new one begins where positions do not count on.

    transformers 5.22.2, masking_utils.py, ``find_packed_sequence_indices``.
    """
    begins = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1
    return begins.cumsum(-1, dtype=torch.int32)  # CANN sums int64 on an AI CPU
