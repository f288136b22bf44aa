"""Turn the layouts of npu_fusion_attention into [B, N, S, D] and back."""

from __future__ import annotations

from torch import Tensor, cat

from softnpu.argument_checks import describe, require

LAYOUTS = ("BSH", "SBH", "BNSD", "BSND", "TND")


def to_bnsd(operator: str, layout: str, head_num: int, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """View query, key and value as [B, N, S, D].

    In BSH and SBH, H of the query is head_num · D, and the keys have the same D.
    """
    require(layout in LAYOUTS, operator, f"input_layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        require(tensor.dim() == len(layout), operator, f"{name} must be {layout}, got {describe(tensor)}")
    if layout in ("BSH", "SBH"):
        head_size, rest = divmod(query.shape[-1], head_num)
        require(
            rest == 0 and head_size > 0 and key.shape[-1] % head_size == 0,
            operator,
            f"H of query and key must be multiples of the head size, got {query.shape[-1]} = {head_num} · D "
            f"and {key.shape[-1]}",
        )
        key_heads = key.shape[-1] // head_size
        require(
            key_heads > 0 and value.shape[-1] % key_heads == 0,
            operator,
            f"H of value ({value.shape[-1]}) must be a multiple of the {key_heads} heads of key",
        )
        heads = {id(query): head_num, id(key): key_heads, id(value): key_heads}
        query, key, value = (t.unflatten(-1, (heads[id(t)], -1)) for t in (query, key, value))
    return [_to_bnsd(layout, tensor) for tensor in (query, key, value)]


def like_query(layout: str, head_num: int, tensor: Tensor) -> Tensor:
    """View a tensor that has the layout and the heads of the query as [B, N, S, D]."""
    return _to_bnsd(layout, tensor.unflatten(-1, (head_num, -1)) if layout in ("BSH", "SBH") else tensor)


def from_bnsd(layout: str, tensor: Tensor) -> Tensor:
    """Make a contiguous tensor in the layout."""
    if layout == "BNSD":
        return tensor.contiguous()
    if layout == "BSND":
        return tensor.transpose(1, 2).contiguous()
    if layout == "TND":
        return tensor.squeeze(0).transpose(0, 1).contiguous()
    tensor = tensor.transpose(1, 2).flatten(2)
    return (tensor.transpose(0, 1) if layout == "SBH" else tensor).contiguous()


def sequences(tensor: Tensor, lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Split a [1, N, T, D] tensor into its sequences; what lies behind them belongs to none."""
    return tensor[:, :, : sum(lengths)].split(lengths, 2)


def join(parts: list[Tensor], length: int) -> Tensor:
    """Undo ``sequences``, padded to the length of the whole: nothing is written behind the last one."""
    whole = cat(parts, 2)
    if whole.shape[2] == length:
        return whole
    rest = whole.new_full((*whole.shape[:2], length - whole.shape[2], whole.shape[3]), float("nan"))
    return cat([whole, rest], 2)


def _to_bnsd(layout: str, tensor: Tensor) -> Tensor:
    if layout == "BNSD":
        return tensor
    if layout == "TND":
        return tensor.transpose(0, 1).unsqueeze(0)
    return tensor.permute(1, 2, 0, 3) if layout == "SBH" else tensor.transpose(1, 2)
