"""What runs for attention: the gradients' sums and the copies that heads of some sizes need."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels_ext_npu.measuring.inside.table import Call, Kernel, nbytes, one_kernel, row
from kernels_ext_npu.measuring.products import packed_lengths

_LONGEST_STRIDE = 65535  # of a position: MAX_STRIDE_S1, MAX_BSN_DIMS_SIZE
_STATISTICS = 8 * 4  # bytes of a row's sum, of which eight copies in float32 are kept


@dataclass(frozen=True)
class Shape:
    """Sizes of queries, keys and values.

    Attributes:
        layout: ``BNSD``, ``BSND``, ``BSH``, ``SBH`` or ``TND``.
        heads: those of the queries.
        key_heads: those of the keys.
        queries: rows of one sequence; of ``TND`` all of them.
        keys: likewise.
        width: of a head of queries and keys.
        value_width: of a head of values.
        batch: sequences beside each other; 1 of ``TND``.
    """

    layout: str
    heads: int
    key_heads: int
    queries: int
    keys: int
    width: int
    value_width: int
    batch: int

    def stride(self, heads: int, width: int) -> int:
        """Return how many elements lie between two positions of a sequence, if a head has this width."""
        return {"BSND": heads * width, "BSH": heads * width, "SBH": self.batch * heads * width}.get(self.layout, 0)


def _shape(given: dict[str, Any]) -> Shape:
    query, key, value, layout = (given[name] for name in ("query", "key", "value", "input_layout"))
    heads, sequence = given["head_num"], layout.index("T" if "T" in layout else "S")
    width = query.shape[-1] if "D" in layout else query.shape[-1] // heads
    key_heads = key.shape[layout.index("N")] if "N" in layout else key.shape[-1] // width
    value_width = value.shape[-1] if "D" in layout else value.shape[-1] // key_heads
    batch = query.shape[layout.index("B")] if "B" in layout else 1
    return Shape(layout, heads, key_heads, query.shape[sequence], key.shape[sequence], width, value_width, batch)


@row(
    "npu_fusion_attention",
    "npu_fusion_attention_v2",
    "npu_fusion_attention_v3",
    source="ops-transformer attention/flash_attention_score/op_api/aclnn_flash_attention_score.cpp, `AnalysisInput`, "
    "`IsNeedPad`, `PreprocessQKV`, `Postprocess`, 8.5.0:316-580,630-760 9.1.0:320-397,572-667,822-989; op-plugin "
    "FlashAttentionV2KernelNpuOpApi.cpp, `dropout_gen_mask`",
)
def _forward(call: Call) -> Iterable[Kernel]:
    """FlashAttentionScore. Before it queries, keys and values are padded where the width of a head is no multiple of
    16, or of 128 from 196 on, but for 448; values also where their heads are narrower than those of up to 1,024 keys;
    the result is cut then. Of ``BSND``, ``BSH`` and ``SBH`` all are transposed, and the result back, where more than
    65,535 elements lie between two positions. Dropout writes a mask first, of one bit for each pair of a query and a
    key."""
    given, shape, out = call.given, _shape(call.given), call.result
    query, key, value = (given[name] for name in ("query", "key", "value"))
    mask = 0
    if given["keep_prob"] < 1:
        mask = _pairs(given, shape) // 8
        yield Kernel("DSAGenBitMask", mask, workspace=mask)
    transposes = shape.stride(shape.heads, _aligned(shape.width)) > _LONGEST_STRIDE
    padding, value_padding = _paddings(given, shape, transposes)
    width, value_width = shape.width + padding, shape.value_width + value_padding
    operands = [_wider(tensor, shape.width, width) for tensor in (query, key)]
    operands.append(_wider(value, shape.value_width, value_width))
    padded_out = _wider(out, shape.value_width, value_width)
    for tensor, size in zip((query, key, value), operands):
        if size != nbytes(tensor):
            yield Kernel("PadV3", nbytes(tensor) + size, workspace=size)
    for size in operands if transposes else ():
        yield Kernel("Transpose", 2 * size, workspace=size)
    larger = sum(operands) - nbytes(query) - nbytes(key) - nbytes(value) + padded_out - nbytes(out)
    between = padded_out if transposes or value_padding else 0
    yield call.main("FlashAttentionScore", call.moved + larger + mask, workspace=between)
    if transposes:
        yield Kernel("Transpose", 2 * padded_out, workspace=padded_out if value_padding else 0)
    if value_padding:
        yield Kernel("Slice", padded_out + nbytes(out))


@row(
    "npu_fusion_attention_grad",
    "npu_fusion_attention_grad_v2",
    "npu_fusion_attention_grad_v3",
    source="ops-transformer attention/flash_attention_score_grad/op_api/aclnn_flash_attention_score_grad.cpp, "
    "`GetInputShapeInfo`, `CheckIsNeedPad`, `CheckTndIsNeedPad` 8.5.0:113-200,374-430 9.0.0:120-236 "
    "9.1.0:137-253,505-617, and op_host/…/flash_attention_score_grad_tiling_s1s2_bn2gs1s2_sab.cpp, `GetWorkspaceSize` "
    "9.1.0:1497-1551",
)
def _backward(call: Call) -> Iterable[Kernel]:
    """FlashAttentionScoreGrad. It sums gradients up in float32 in its workspace: zeros are written there, products
    added at least once, and the sums read to be cast. Before that it reads the result's gradient once more, for a sum
    of each row. Narrower values, their gradient and the result are padded to the width of the keys, but for 192 and 128
    where the order of sums is free; all is padded where the width is no multiple of 16, or of 128 from 128 on, but for
    192 outside of ``TND`` and for multiples of eight in ``TND`` where the order is free; gradients are cut. Transposes
    are those of the forward. Dropout writes its mask once more."""
    given, shape = call.given, _shape(call.given)
    query, key, value, dy = (given[name] for name in ("query", "key", "value", "dy"))
    like_values = [tensor for tensor in (value, dy, given["attention_in"]) if tensor is not None]
    rows = dy.numel() // shape.value_width
    mask = 0
    if given["keep_prob"] < 1:
        mask = _pairs(given, shape) // 8
        yield Kernel("DSAGenBitMask", mask, workspace=mask)
    is_free = not torch.are_deterministic_algorithms_enabled()
    value_width, width = shape.value_width, shape.width
    if value_width != width and not ((width, value_width) == (192, 128) and is_free):
        for tensor in like_values:
            size = _wider(tensor, value_width, width)
            yield Kernel("PadV3", nbytes(tensor) + size, workspace=size)
        value_width = width
    block = 16 if width < 128 else 128
    aligned = -(-width // block) * block
    transposes = shape.stride(max(shape.heads, shape.key_heads), aligned) > _LONGEST_STRIDE
    pads = aligned != width and _gradient_pads(given, shape, transposes, is_free)
    value_inner = aligned if pads else value_width
    narrow = [(query, width, width), (key, width, width)]
    narrow += [(tensor, shape.value_width, value_width) for tensor in like_values]
    sizes = []
    for tensor, own, before in narrow:
        size = _wider(tensor, own, aligned if pads else before)
        if pads:
            yield Kernel("PadV3", _wider(tensor, own, before) + size, workspace=size)
        if transposes:
            yield Kernel("Transpose", 2 * size, workspace=size)
        sizes.append(size)
    gradients = sizes[:3]
    larger = sum(sizes) + sum(gradients) - sum(map(nbytes, (query, key, *like_values, query, key, value)))
    sums = 4 * sum(gradients) // query.dtype.itemsize
    again = sizes[3] + 2 * rows * _STATISTICS
    is_cut = pads or value_inner != shape.value_width
    between = sum(gradients) if transposes or pads else gradients[2] if is_cut else 0
    workspace = sums + rows * _STATISTICS + between
    yield call.main("FlashAttentionScoreGrad", call.moved + larger + mask + 4 * sums + again, workspace=workspace)
    for tensor, size in zip((query, key, value), gradients):
        if transposes:
            yield Kernel("Transpose", 2 * size, workspace=size if size != nbytes(tensor) else 0)
        if size != nbytes(tensor):
            yield Kernel("Slice", size + nbytes(tensor))


def _gradient_pads(given: dict[str, Any], shape: Shape, transposes: bool, is_free: bool) -> bool:
    """Tell whether gradients of heads of such a width want padding."""
    if shape.layout != "TND":
        if shape.width == 192 and not transposes:
            return False
        is_short = max(shape.queries, shape.keys) <= 4096 and shape.heads == shape.key_heads
        return not (shape.width in (72, 88) and is_short and shape.layout != "BNSD" and not transposes)
    if not is_free:
        return True
    is_small = given["keep_prob"] == 1 and shape.width < 96 and _is_short(given)
    return not (shape.width % 8 == 0 or is_small)


def _aligned(width: int) -> int:
    """Return the width to which heads are padded in the forward."""
    block = 16 if width < 196 or width == 448 else 128
    return -(-width // block) * block


def _paddings(given: dict[str, Any], shape: Shape, transposes: bool) -> tuple[int, int]:
    """Return by how much heads of queries and keys, and of values, are padded in the forward."""
    width, value_width = shape.width, shape.value_width
    block = 16 if width < 196 or width == 448 else 128
    padding, value_padding = _aligned(width) - width, -(-value_width // block) * block - value_width
    if width != value_width and width in (64, 80, 88):
        value_padding = padding + width - value_width
    if shape.layout == "TND":
        return (0, 0) if width < 96 and _is_short(given) else (padding, value_padding)
    if shape.layout != "BNSD" and shape.heads == shape.key_heads and not transposes:
        padding = 0 if width in (72, 88) else padding
        value_padding = 0 if value_width in (72, 88) else value_padding
    if width != value_width and shape.keys <= 1024:
        has_own = given["query"].dtype is not torch.float32 and shape.keys >= 512
        if not (has_own and ((width + padding) % 16 or width == 96)):
            value_padding = padding + width - value_width
    return padding, value_padding


def _is_short(given: dict[str, Any]) -> bool:
    """Tell whether packed sequences are short, where their lengths are known."""
    lengths = packed_lengths(given)
    return bool(lengths) and max(keys for _, keys in lengths) <= 1024 and sum(q for q, _ in lengths) < 160 * 1024


def _pairs(given: dict[str, Any], shape: Shape) -> int:
    """Return how many pairs of a query and a key there are in all heads, seen or not."""
    if shape.layout == "TND":
        lengths = packed_lengths(given) or [(shape.queries, shape.keys)]
        return shape.heads * sum(queries * keys for queries, keys in lengths)
    return given["query"].numel() // shape.width * shape.keys


def _wider(tensor: Tensor, width: int, padded: int) -> int:
    """Return the bytes of a tensor whose heads have another width."""
    return nbytes(tensor) // width * padded


one_kernel(
    "npu_fused_infer_attention_score",
    "npu_fused_infer_attention_score_v2",
    kernel="FusedInferAttentionScore",
    source="op-plugin FusedInferAttentionScoreKernelNpuOpApi.cpp; ops-transformer "
    "attention/fused_infer_attention_score/op_host/fused_infer_attention_score_def.cpp (`AutoContiguous`)",
)
one_kernel(
    "npu_lightning_indexer",
    kernel="LightningIndexer",
    source="op-plugin LightningIndexerKernelNpuOpApi.cpp; ops-transformer attention/lightning_indexer/op_host/"
    "lightning_indexer_def.cpp (`AutoContiguous`)",
)
one_kernel(
    "npu_sparse_flash_attention",
    kernel="SparseFlashAttention",
    source="op-plugin SparseFlashAttentionKernelNpuOpApi.cpp; ops-transformer attention/sparse_flash_attention/op_host/"
    "sparse_flash_attention_def.cpp (`AutoContiguous`)",
)
