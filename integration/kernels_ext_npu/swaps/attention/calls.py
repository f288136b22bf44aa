"""The functions and masks that transformers calls by the name of an attention implementation.

The kernel is the implementation ``npu_flash_attention``. While it is registered it also computes ``sdpa`` on the NPU,
and ``eager`` for models that have nothing better, unless the user named it. Configs keep the names, so that code which
reads or wraps an implementation finds what it would without kernels. Where the kernel cannot compute a call, and on
other devices, the original function does, with the mask that it expects.

Whether sequences are packed is told by positions. Those that a model counts itself are of one sequence, and are not
looked at; those that were given go to the kernel, which reads them once a forward, and not once a mask.
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
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kernels_ext_npu.binding import registration
from kernels_ext_npu.binding.named_implementation import NPU_FLASH_ATTENTION
from kernels_ext_npu.binding.torch_operators import sdpa
from kernels_ext_npu.context_parallel import guards
from kernels_ext_npu.swaps.attention import eligibility, indexers, mla_absorb

_makes_positions: ContextVar[bool] = ContextVar("_makes_positions", default=False)


def npu_flash_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of a module that names the kernel, by its `attention_forward`.

    The weights, ``[B, N, S_q, S_k]``, are returned where ``output_attentions`` asks for them and nothing is packed.
    """
    guards.refuse_partial_sequence(module, NPU_FLASH_ATTENTION.name)
    result = _attend(module, query, key, value, attention_mask, *args, **kwargs)
    if not kwargs.get("output_attentions") or kwargs.get("cu_seq_lens_q") is not None:
        return result, None
    # with the identity matrix as values the result is the weights
    one_of_each = torch.eye(key.shape[2], dtype=value.dtype, device=value.device).expand(*key.shape[:2], -1, -1)
    return result, _attend(module, query, key, one_of_each, attention_mask, *args, **kwargs).transpose(1, 2)


def npu_flash_attention_mask(*args: Any, **kwargs: Any) -> Any:
    """Describe the mask of a forward for the kernel, by its `attention_mask`."""
    if guards.exchanges_keys():
        kwargs = guards.exchange().mask_arguments(kwargs)
    config = kwargs.get("config")
    if eligibility.names_flex(config) or eligibility.is_eager_by_default(type(config)):  # which mask by a mask alone
        kwargs |= dict.fromkeys(("allow_is_causal_skip", "allow_is_bidirectional_skip"), False)
    return registration.package(NPU_FLASH_ATTENTION.repository).attention_mask(*args, **kwargs)


def kernel_or_sdpa(
    original: Callable,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *args,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of a module that names ``sdpa`` or ``eager`` by the kernel, or else by the original."""
    is_sdpa = original is sdpa_attention_forward
    config: Any = module.config
    indices, cu_seqlens = kwargs.get("indices"), kwargs.get("cu_seq_lens_q")
    is_served = (
        NPU_FLASH_ATTENTION.is_registered()
        and (is_sdpa or (config._attn_implementation == eligibility.EAGER and eligibility.serves_config(config)))
        and eligibility.refusal(module, query.device.type, query.dtype, kwargs.get("softcap")) is None
        and kwargs.get("position_bias") is None
        and not kwargs.get("output_attentions", getattr(config, "output_attentions", False))
        and _fits(attention_mask, query, key, kwargs.get("cache"))
    )
    guards.refuse_partial_sequence(module, "sdpa" if is_sdpa else "eager", is_served)
    causal = getattr(module, "is_causal", True) if kwargs.get("is_causal") is None else kwargs["is_causal"]
    queries = query.shape[2]
    if is_served:
        if is_sdpa and attention_mask is None and causal and 1 < queries < key.shape[2]:
            # a prompt in a static cache: its first query stands at the first key, and the slots behind it are free
            key, value = key[:, :, :queries], value[:, :, :queries]
        return _attend(module, query, key, value, attention_mask, *args, **kwargs), None
    original = functools.partial(sdpa.left_to_torch, original)
    if is_sdpa and guards.exchanges_keys():
        guards.refuse_mask(module, attention_mask)
    if not (attention_mask is None or isinstance(attention_mask, Tensor)):
        is_left_to_sdpa = is_sdpa and indices is None
        attention_mask = attention_mask.sdpa_mask(len(query)) if is_left_to_sdpa else attention_mask.mask(query.device)
    if attention_mask is not None and indices is not None:  # no original reads indices
        attention_mask = indexers.without_unchosen(attention_mask, indices)
    if not is_sdpa and attention_mask is not None and not attention_mask.is_floating_point():  # it is added to scores
        attention_mask = torch.where(attention_mask, query.new_zeros(()), torch.finfo(query.dtype).min)
    if cu_seqlens is not None and attention_mask is None and not causal:
        # a tower that was told to concatenate sequences: the original gets them one by one
        parts = zip(*(tensor.split(torch.diff(cu_seqlens).tolist(), dim=2) for tensor in (query, key, value)))
        return torch.cat([original(module, *part, None, *args, **kwargs)[0] for part in parts], dim=1), None
    return original(module, query, key, value, attention_mask, *args, **kwargs)


def kernel_or_flex(
    original: Callable, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of a module that names ``flex_attention`` by the kernel, or else by the original."""
    refusal = eligibility.refusal(module, query.device.type, query.dtype, None)
    if not NPU_FLASH_ATTENTION.is_registered() or refusal is not None:
        if not (mask is None or isinstance(mask, Tensor | BlockMask)):  # the original adds a tensor to scores
            mask = torch.where(mask.mask(query.device), query.new_zeros(()), torch.finfo(query.dtype).min)
        return original(module, query, key, value, mask, **kwargs)
    guards.refuse_partial_sequence(module, eligibility.FLEX)
    if isinstance(mask, BlockMask):
        from kernels_ext_npu.flex_attention import block_masks  # for those that use it alone

        mask = block_masks.describe_block_mask(mask)
    if mask is None:  # the original asks no module whether it is causal
        kwargs["is_causal"] = False
    return _attend(module, query, key, value, mask, **kwargs), None


def get_interface(original: Callable, self: AttentionInterface, implementation: str, default: Callable) -> Callable:
    """Return what a module calls, in place of ``get_interface`` of transformers' table: the default is its formula."""
    found = original(self, implementation, default)
    return functools.partial(kernel_or_sdpa, found) if implementation == "eager" and found is default else found


def mask_for_kernel(original: Callable) -> Callable:
    """Wrap a mask function of transformers: for the kernel it describes the mask, otherwise it makes a tensor."""

    @functools.wraps(original)
    def mask(*args: Any, **kwargs: Any) -> Any:
        given, config = kwargs.get("attention_mask"), kwargs.get("config")
        if given is not None and not isinstance(given, Tensor):  # a description, from the model around this one
            return given if eligibility.takes_mask_description(config) else given.mask()
        if (
            torch.device(kwargs.get("device", "cpu")).type == "npu"
            and eligibility.takes_mask_description(config)
            and not args
            and (eligibility.names_flex(config) or not getattr(config, "attn_logit_softcapping", None))
            and (given is None or len(given) == kwargs["batch_size"])
            and registration.try_package(NPU_FLASH_ATTENTION.repository) is not None
        ):
            return npu_flash_attention_mask(**kwargs)
        return original(*args, **(guards.exchange().mask_arguments(kwargs) if guards.exchanges_keys() else kwargs))

    return mask


def attach_context_parallel_hooks(original: Callable, model: nn.Module) -> None:
    """Skip accelerate's context parallelism hook, which strips masks, where the kernel computes the attention."""
    config = getattr(model, "config", None)
    if not (eligibility.takes_mask_description(config) or NPU_FLASH_ATTENTION.is_named_by(config)):
        original(model)


def reads_no_positions() -> bool:
    """Tell whether positions need not be read on the host; torch.compile does not read them anyway."""
    return NPU_FLASH_ATTENTION.is_registered() and not torch.compiler.is_compiling()


def call_model(original: Callable, self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """Call a model, in place of its ``__call__``, and note whether it counts its positions itself, from zero.

    A model that is not transformers' own may make positions of packed sequences. The innermost model makes the masks.
    """
    guards.share_recurrences(self)
    guards.refuse_unshifted(self, kwargs, sys._getframe(1))
    is_known = getattr(inspect.unwrap(self.forward), "__module__", "").startswith("transformers.")
    # of two positional arguments the second could be positions
    makes_positions = is_known and len(args) <= 1 and kwargs.get("position_ids") is None
    if makes_positions:
        guards.refuse_own_positions(self)
    token = _makes_positions.set(makes_positions)
    try:
        return original(self, *args, **kwargs)
    finally:
        _makes_positions.reset(token)


def preprocess(original: Callable, *args: Any, **kwargs: Any) -> tuple:
    """Prepare a mask, in place of ``_preprocess_mask_arguments`` of masking_utils, without reading positions."""
    given = inspect.signature(original).bind(*args, **kwargs).arguments.values()
    config, embeddings, padding, cache, positions, *rest = given
    is_standing_in = embeddings.device.type == "npu" and eligibility.takes_mask_description(config)
    if not (is_standing_in or NPU_FLASH_ATTENTION.is_named_by(config)):
        return original(*given)
    is_done, mask, _, *sizes = original(config, embeddings, padding, cache, None, *rest)
    packed = None
    if is_done and mask is None and not isinstance(padding, Tensor):
        mask = padding  # a description, with a paged cache, for which transformers 5.24 wants no mask
    if guards.exchanges_keys() and not is_done:  # a bidirectional mask has no packed sequences
        mask = guards.exchange().sequences(embeddings, positions, padding)
    elif (
        not guards.are_split()  # positions of a part of a sequence do not tell where others begin
        and positions is not None
        and mask is None
        and cache is None
        and not _makes_positions.get()
    ):
        # as find_packed_sequence_indices does: a sequence begins where a position is not the last plus one
        positions = positions.expand(len(embeddings), -1)
        begins = torch.diff(positions, prepend=positions[:, :1] - 1) != 1
        packed = begins.cumsum(-1, dtype=torch.int32)  # CANN sums int64 on an AI CPU
    return is_done, mask, packed, *sizes


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
) -> Tensor:
    if guards.exchanges_keys() and (getattr(module, "is_causal", True) or kwargs.get("cu_seq_lens_q") is None):
        return guards.exchange().attend(module, query, key, value, attention_mask, *args, **kwargs)
    guards.refuse_sinks(query, kwargs.get("s_aux"))
    if kwargs.get("cu_seq_lens_q") is None:
        kwargs |= guards.gathered_cu_seqlens(module, query, kwargs.get("position_ids"))
    if attention_mask is None and eligibility.is_eager_by_default(type(getattr(module, "config", None))):
        kwargs["is_causal"] = False  # its formula masks by a mask alone
    kernel = registration.package(NPU_FLASH_ATTENTION.repository)
    if "indices" in kwargs and (training := indexers.trained_by(module)) is not None:
        training.compare(kernel, module, query, key, attention_mask, kwargs)
    given = query, key, value, attention_mask, kwargs
    if (chosen := mla_absorb.latents_for_chosen_keys(*given, kernel.reads_chosen_in_place)) is not None:
        options = kwargs["indices"], kwargs["scaling"], kwargs.get("s_aux")
        return chosen.attend_chosen(kernel.attend_chosen, query, attention_mask, *options)

    def attend(query: Tensor, key: Tensor, value: Tensor, rotated: tuple[Tensor, Tensor] | None = None) -> Tensor:
        return kernel.attention_forward(module, query, key, value, attention_mask, *args, **kwargs, rotated=rotated)[0]

    if (few := mla_absorb.latents_for_few_queries(query, key, value, kwargs)) is not None:
        return few.attend(attend, query)
    return attend(query, mla_absorb.expanded(key), mla_absorb.expanded(value))


def _fits(mask: Any, query: Tensor, key: Tensor, paged_cache: Any) -> bool:
    """Tell whether a mask has the shape of these tensors; if not, transformers' function raises its own error."""
    if mask is None or not isinstance(mask, Tensor):
        return mask is None or mask.fits(query.shape[2], key.shape[2])
    has_keys = paged_cache is not None or mask.shape[-1] == key.shape[2]  # paged keys are read later
    return has_keys and mask.dim() == 4 and all(a in (1, b) for a, b in zip(mask.shape[:3], query.shape))
