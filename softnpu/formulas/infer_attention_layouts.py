"""Turn the layouts of the inference attention operators into one [N, S, D] tensor a sequence, and back.

op-plugin, docs/zh/custom_APIs/torch_npu/torch_npu-npu_fused_infer_attention_score.md. Right of an underscore stands
the layout of the result.
"""

from __future__ import annotations

import torch
from torch import Tensor, cat, stack

from softnpu.argument_checks import describe, require, require_values

LAYOUTS = (
    "BSH", "BSND", "BNSD", "BNSD_BSND", "BSH_BNSD", "BSND_BNSD", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD", "TND", "TND_NTD",
    "NTD", "NTD_TND",
)  # fmt: skip
MOST_SEQUENCES = 4096
BLOCK_SIZES = range(128, 513, 128)


def is_packed(layout: str) -> bool:
    """Tell whether several sequences lie one behind the other."""
    return "T" in layout


def to_nsd(operator: str, layout: str, heads: int, name: str, tensor: Tensor, ends: list[int] | None) -> list[Tensor]:
    """Return [N, S, D] for every sequence; ``ends`` are the cumulative lengths of TND and NTD."""
    layout = layout.partition("_")[0]
    require(tensor.dim() == len(layout), operator, f"{name} must be {layout}, got {describe(tensor)}")
    require(tensor.is_contiguous(), operator, f"{name} must be contiguous, got strides {tensor.stride()}")
    if layout == "BSH":
        require(tensor.shape[-1] % heads == 0, operator, f"H of {name} must be a multiple of {heads}")
        tensor = tensor.unflatten(-1, (heads, -1))
    if is_packed(layout):
        tensor = tensor.transpose(0, 1) if layout == "TND" else tensor
        parts = _split(operator, name, tensor, ends)
    else:
        parts = list(tensor if layout == "BNSD" else tensor.transpose(1, 2))
    found = tensor.shape[0] if is_packed(layout) else tensor.shape[1 if layout == "BNSD" else 2]
    require(found == heads, operator, f"{name} must have {heads} heads, got {describe(tensor)} as {layout}")
    return parts


def from_nsd(layout: str, parts: list[Tensor], tokens: int) -> Tensor:
    """Make the contiguous result; what lies behind the last of several sequences is not written."""
    layout = layout.rpartition("_")[2]
    if is_packed(layout):
        whole = cat(parts, 1)
        rest = whole.new_full((whole.shape[0], tokens - whole.shape[1], whole.shape[2]), torch.nan)
        whole = cat([whole, rest], 1)
        return (whole.transpose(0, 1) if layout == "TND" else whole).contiguous()
    whole = stack(parts)  # [B, N, S, D]
    if layout == "BSH":
        return whole.transpose(1, 2).flatten(2)
    axes = {"BNSD": (0, 1, 2, 3), "BSND": (0, 2, 1, 3), "NBSD": (1, 0, 2, 3)}[layout]
    return whole.permute(axes).contiguous()


def from_blocks(
    operator: str, name: str, cache: Tensor, heads: int, block_size: int, table: Tensor, lengths: list[int]
) -> list[Tensor]:
    """Gather [N, S, D] for every sequence from blocks [count, block_size, H] or [count, N, block_size, D]."""
    require(cache.is_contiguous(), operator, f"{name} must be contiguous, got strides {cache.stride()}")
    given = f"{name} must be [blocks, {block_size}, H] or [blocks, {heads}, {block_size}, D], got {describe(cache)}"
    if cache.dim() == 3:
        require(cache.shape[1] == block_size and cache.shape[2] % heads == 0, operator, given)
        rule = f"H of {name} in blocks must be at most 65535, got {cache.shape[2]}"
        require(cache.shape[2] <= 65535, operator, rule)
        cache = cache.unflatten(-1, (heads, -1)).transpose(1, 2)
    fits = cache.dim() == 4 and tuple(cache.shape[1:3]) == (heads, block_size)
    require(fits, operator, given)
    rule = f"block_table must be int32 [{len(lengths)}, blocks], got {describe(table)}"
    require(table.dtype == torch.int32 and table.dim() == 2 and len(table) == len(lengths), operator, rule)
    parts = []
    for row, length in zip(table, lengths):
        count = -(-length // block_size)
        require(
            count <= len(row), operator, f"block_table has {len(row)} blocks for {length} keys of {block_size} each"
        )
        chosen = row[:count].long()
        inside = bool(((chosen >= 0) & (chosen < len(cache))).all())
        require_values(inside, operator, f"block_table must name blocks below {len(cache)}, got {chosen.tolist()}")
        parts.append(cache[chosen].transpose(0, 1).flatten(1, 2)[:, :length])
    return parts


def actual_lengths(operator: str, name: str, given: list[int] | None, batch: int, longest: int) -> list[int]:
    """Return one valid length a batch: all of them where none is given, the same for all where one is."""
    if given is None:
        return [longest] * batch
    rule = f"{name} must have one length or one for each of {batch}, got {given}"
    require(len(given) == 1 or len(given) >= batch, operator, rule)
    lengths = list(given) * batch if len(given) == 1 else list(given[:batch])
    require(all(0 <= n <= longest for n in lengths), operator, f"{name} must be in [0, {longest}], got {given}")
    return lengths


def _split(operator: str, name: str, tensor: Tensor, ends: list[int] | None) -> list[Tensor]:
    rule = f"the layout of {name} needs 1 to {MOST_SEQUENCES} cumulative lengths, got {ends}"
    require(ends is not None and 0 < len(ends) <= MOST_SEQUENCES, operator, rule)
    starts = [0, *(ends or [])[:-1]]
    lengths = [end - start for start, end in zip(starts, ends or [])]
    fits = min(lengths) >= 0 and sum(lengths) <= tensor.shape[1]
    require(fits, operator, f"cumulative lengths of {name} must not fall or pass {tensor.shape[1]}, got {ends}")
    return list(tensor[:, : sum(lengths)].split(lengths, 1))
