"""Let transformers' continuous batching, ``generate_batch``, capture its steps into graphs on NPUs.

A captured step may not read lengths on the host, as attention of packed sequences does. It gets masks instead, which
the device makes of the lengths: once a step and kind of layer, in the graph, so that each replay has those of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching import continuous_api, utils
from transformers.generation.continuous_batching.cache_allocators import SLIDING_ATTENTION
from transformers.generation.continuous_batching.model_runner import ModelRunner

from kernels_ext_npu.binding import registration
from kernels_ext_npu.binding.named_implementation import NPU_FLASH_ATTENTION
from kernels_ext_npu.binding.patches import Patches
from kernels_ext_npu.decoding.graphed_forward import GRAPHS, CaptureError, place
from kernels_ext_npu.swaps.attention.eligibility import serves_config


def install(patches: Patches) -> None:
    """Tell transformers the class of graphs, and let steps with our attention be captured."""
    if "npu" not in utils.DEVICE_TYPE_TO_GRAPH_NAME:
        patches.item(utils.DEVICE_TYPE_TO_GRAPH_NAME, "npu", GRAPHS)
    patches.method(continuous_api, "resolve_continuous_batching_config", _resolve, registration.is_active)
    patches.method(
        continuous_api.ContinuousBatchingManager, "switch_to_cb_friendly_attn", _switch, registration.is_active
    )
    patches.method(ModelRunner, "_forward_process_and_sample", _with_masks, registration.is_active)
    patches.method(ModelRunner, "_capture_graph", _capture, registration.is_active)


def _resolve(original: Callable, config: Any, cb_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Take graphs where they are asked for only, since not every model can be captured.

    Batches are prepared while others run on CUDA and XPU only (``ContinuousBatchingAsyncIOs``): who asks for it on an
    NPU gets transformers' error, and who leaves it open does without.
    """
    if utils.get_accelerator_graph_name() == GRAPHS:
        _refuse_heads_of_two_sizes(config)
        cb_config = copy.copy(cb_config)
        if cb_config.use_async_batching is None:
            cb_config.use_async_batching = False
        asks = cb_config.q_padding_interval_size or cb_config.kv_padding_interval_size
        if cb_config.use_cuda_graph is None and not asks:
            cb_config.use_cuda_graph = False
    return original(config, cb_config, *args, **kwargs)


def _refuse_heads_of_two_sizes(config: Any) -> None:
    """Refuse latent attention, whose keys and values transformers 5.22.2 writes into pages of another size."""
    if not hasattr(config, "qk_nope_head_dim"):
        return
    key, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    page = utils.find_head_dim(config)
    if not key == value == page:
        raise ValueError(
            f"continuous batching: pages of {config.model_type} are for heads of {page} numbers, and its latent "
            f"attention has keys of {key} and values of {value}. Use generate"
        )


def _switch(original: Callable, manager: Any, model: Any, auto_switch_to_flash: bool = True) -> None:
    """Switch to a flash attention as transformers does by itself: to ours, which takes lengths and makes no masks."""
    before = model.config._attn_implementation
    if auto_switch_to_flash and model.device.type == "npu" and serves_config(model.config):
        model.set_attn_implementation(NPU_FLASH_ATTENTION.name)
        manager._original_attn_impl = before
    original(manager, model, auto_switch_to_flash)


def _with_masks(original: Callable, runner: ModelRunner, model: Any, batch_data: dict, *args: Any) -> None:
    """Run a step whose attention is ours with the masks of its sequences, if it is to be captured.

    Otherwise the lengths of all kinds of layers are read before it: each layer would ask for those of its own.
    """
    config = model.config.get_text_config()
    takes_lengths = batch_data["block_table"] is None and batch_data["attention_mask"] is None
    if takes_lengths and NPU_FLASH_ATTENTION.is_named_by(config):
        if runner.use_cuda_graph_varlen:
            batch_data = {**batch_data, "attention_mask": _masks(config, batch_data)}
        else:
            kernel = registration.package(NPU_FLASH_ATTENTION.repository)
            kernel.read_together(batch_data["cu_seq_lens_q"], *batch_data["cu_seq_lens_k"].values())
    original(runner, model, batch_data, *args)


def _masks(config: Any, batch: dict) -> Any:
    """Return what our attention takes as its mask, by type of layer; alone where there is one, as transformers does."""
    queries = batch["input_ids"].shape[1]
    made = {}
    for layer_type, allocator in batch["cache"].cache_allocators.items():
        keys = batch["read_index"][allocator.index].shape[0] or queries
        window = config.sliding_window if layer_type == SLIDING_ATTENTION else None
        seen = _seen(batch["cu_seq_lens_q"], batch["cu_seq_lens_k"][layer_type], queries, window)
        made[layer_type] = registration.package(NPU_FLASH_ATTENTION.repository).attention_mask(
            1, queries, keys, mask_function=seen, device=batch["input_ids"].device
        )
    return made if len(made) > 1 else next(iter(made.values()))


def _seen(starts: Tensor, key_starts: Tensor, queries: int, window: int | None) -> Callable[..., Tensor]:
    """Return the mask function of packed sequences whose lengths only the device knows.

    Query ``i`` of the sequence ``[a, b)`` sees of its keys ``[c, d)`` those up to ``d - b + i``, where the last query
    stands at the last key, and with a window the last of them. Queries behind all sequences fill the batch up and see
    none.

    Args:
        starts: ``[1 + sequences]``, where the sequences begin, and where the last one ends.
        key_starts: ``[1 + sequences]``, likewise of the keys.
        queries: how many there are, with those that fill up.
        window: of how many keys a query sees the last, itself included; None for all.
    """
    places = torch.arange(queries, device=starts.device, dtype=starts.dtype)
    sequence = (places[:, None] >= starts[None, 1:]).sum(-1).clamp_(max=len(starts) - 2)
    last = places + (key_starts - starts)[1:].index_select(0, sequence)
    first = key_starts.index_select(0, sequence)
    if window is not None:
        first = torch.maximum(first, last - (window - 1))
    last = torch.where(places < starts[-1], last, -1)

    def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= first.view(query.shape)) & (key <= last.view(query.shape))

    return seen


def _capture(original: Callable, runner: ModelRunner, *args: Any) -> None:
    try:
        original(runner, *args)
    except RuntimeError as error:
        if "capture" not in str(error):
            raise
        raise CaptureError(
            f"continuous batching cannot capture this model: {place(error)}: {str(error).splitlines()[0]}. Leave out "
            "use_cuda_graph"
        ) from error
