"""What operators refuse, as the device does: by their name, with the rule.

That no operator takes float64 is asked of each that a test of formulas calls: conforming.py.
"""

import re

import pytest
import torch
import torch_npu
from torch import Tensor

from tests.softnpu.expert_refusals import EXPERTS
from tests.softnpu.given import LONG, fp16, half, index, int8, int32, npu

SWIGLU_BACKWARD, GEGLU_GRAD = torch.ops.npu.npu_swiglu_backward, torch.ops.npu.npu_geglu_grad


def rotary(x: tuple[int, ...], cos: tuple[int, ...], mode: str = "half", **options) -> Tensor:
    return torch_npu.npu_rotary_mul(npu(*x), npu(*cos), npu(*cos), mode, **options)


def gradient_of_cos(x: tuple[int, ...], cos: tuple[int, ...], **options) -> None:
    torch_npu.npu_rotary_mul(npu(*x), npu(*cos).requires_grad_(), npu(*cos), **options).sum().backward()


def mrope(positions: Tensor, head_size: int = 64, rows: int = 32, **options):
    q = half(1, head_size)
    return torch_npu.npu_mrope(positions, q, q, half(4, rows), head_size, **options)


def kept(places: Tensor, **options):
    key_arguments = half(1, 1, 2, 576), half(512), half(1, 1, 2, 64), half(1, 1, 2, 64)
    return torch_npu.npu_kv_rmsnorm_rope_cache(*key_arguments, places, half(1, 1, 4, 64), half(1, 1, 4, 512), **options)


def loss(trains: bool = False, **options):
    given = {"input": npu(6, 11).requires_grad_(trains), "target": index(0, 1, 2, 3, 4, 10)} | options
    return torch_npu.npu_cross_entropy_loss(**given)


def attention(version: int = 3, shapes=((2, 4, 5, 16), (2, 2, 7, 16), (2, 2, 7, 16)), **options):
    operator = getattr(torch_npu, "npu_fusion_attention" + ("", "_v2", "_v3")[version - 1])
    return operator(*(npu(*shape) for shape in shapes), **{"head_num": 4, "input_layout": "BNSD"} | options)


def sequences(**options):
    ends = {"actual_seq_qlen": [3, 5], "actual_seq_kvlen": [3, 7], "atten_mask": TRIANGLE}
    shapes = (5, 4, 16), (7, 2, 16), (7, 2, 16)
    return attention(2, shapes, input_layout="TND", **ends | options)


SEVERAL = ((2, 4, 3, 64), (2, 4, 5, 64), (2, 4, 5, 64))


def inference(shapes=SEVERAL, heads: int = 4, layout: str = "BNSD", **options):
    tensors = (half(*shape) for shape in shapes)
    return torch_npu.npu_fused_infer_attention_score(*tensors, num_heads=heads, input_layout=layout, **options)


def latent(heads: int = 32, queries: int = 1, layout: str = "BNSD", dtype: torch.dtype = torch.bfloat16, **options):
    """In pages, which every release takes."""
    sizes = (2, queries, heads) if layout.startswith("BSND") else (2, heads, queries)
    pages, given = half(3, 1, 16, 512), {"block_table": int32(2, 1), "block_size": 16, "actual_seq_lengths_kv": [7, 9]}
    given |= {"query_rope": half(*sizes, 64).to(dtype), "key_rope": half(3, 1, 16, 64), "num_key_value_heads": 1}
    options = {"num_heads": heads, "input_layout": layout} | given | options
    return torch_npu.npu_fused_infer_attention_score(half(*sizes, 512), pages, pages, **options)


def joined(**options):
    column = npu(1, 2, 5, 8)
    given = {f"{when}_{name}": column for when in ("prev", "cur") for name in ("softmax_max", "softmax_sum")}
    given |= {"prev_attn_out": npu(5, 1, 32), "cur_attn_out": npu(5, 1, 32)}
    return torch_npu.npu_ring_attention_update(**given | options)


def indexed(**options):
    given = {"query": half(2, 5, 8, 128), "key": half(2, 11, 1, 128), "weights": half(2, 5, 8)} | options
    return torch_npu.npu_lightning_indexer(**given)


def chosen(**options):
    given = {"query": half(2, 5, 8, 512), "key": half(2, 11, 1, 512), "value": half(2, 11, 1, 512)}
    given |= {"query_rope": half(2, 5, 8, 64), "key_rope": half(2, 11, 1, 64), "sparse_indices": int32(2, 5, 1, 6)}
    return torch_npu.npu_sparse_flash_attention(**given | {"scale_value": 0.1, "attention_mode": 2} | options)


def clipped(group_index: Tensor) -> Tensor:
    return torch_npu.npu_clipped_swiglu(npu(2, 4), group_index=group_index)


TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1).npu()
HIDDEN = torch.ones(5, 7, dtype=torch.bool).npu()
FEW = torch.zeros(3, 5, dtype=torch.bool).npu()
A, B, X, W = int8(3, 16), int8(16, 4), fp16(3, 64), int8(64, 4)
P, K, BIG, RANKS = npu(4), int32(4), npu(1, 1, 32, 32), npu(2, 3, 4)
ACTIVATIONS_AND_NORMS = [
    (lambda: torch_npu.npu_silu(half(2)), "npu_silu: .*dtypes"),
    (lambda: torch_npu.npu_gelu(npu(2), approximate="erf"), "approximate must be"),
    (lambda: torch_npu.npu_gelu_mul(npu(2, 3)), "the last even"),
    (lambda: torch_npu.npu_gelu_mul(npu(2, 1026)), "at most 1024"),
    (lambda: torch_npu.npu_fast_gelu(npu(*[1] * 9)), "npu_fast_gelu: .*at most 8 dimensions"),
    (lambda: torch_npu.npu_rms_norm(half(2, 4), fp16(4)), "npu_rms_norm: .*bfloat16, float16"),
    (lambda: torch_npu.npu_rms_norm(npu(2, 4), half(4)), "float32, bfloat16"),
    (lambda: torch_npu.npu_rms_norm(npu(2, 4), npu(3)), r"gamma must have the last dimensions of x .*\[3\]"),
    (lambda: torch_npu.npu_rms_norm(npu(2, 4), npu(2, 4)), "fewer than x"),
    (lambda: torch_npu.npu_rms_norm(npu(4), npu(4)), "2 to 8 dimensions"),
    (lambda: torch_npu.npu_rms_norm(npu(*[1] * 9), npu(1)), "2 to 8 dimensions"),
    (lambda: torch_npu.npu_gemma_rms_norm(half(2, 4), npu(4)), "npu_gemma_rms_norm: .*bfloat16, float32"),
    (lambda: torch_npu.npu_gemma_rms_norm(npu(4, 2).t(), npu(4)), "contiguous"),
    (lambda: torch_npu.npu_gemma_rms_norm(npu(0, 4), npu(4)), "empty"),
    (lambda: torch_npu.npu_add_rms_norm(npu(2, 4), npu(1, 4), npu(4)), "npu_add_rms_norm: .*differ in shape"),
    (lambda: torch_npu.npu_add_rms_norm(npu(2, 4), npu(2, 4), half(4)), "float32, float32, bfloat16"),
    (lambda: torch_npu.npu_add_rms_norm(npu(0, 4), npu(0, 4), npu(4)), "empty"),
    (lambda: torch_npu.npu_add_layer_norm(RANKS, fp16(2, 3, 4), fp16(4), npu(4)), "npu_add_layer_norm: .*dtypes"),
    (lambda: torch_npu.npu_add_layer_norm(RANKS, RANKS, npu(3), npu(3)), "gamma must be"),
    (lambda: torch_npu.npu_group_norm_silu(RANKS, npu(3), npu(3), 2), "divide the 3 channels"),
    (lambda: torch_npu.npu_group_norm_silu(RANKS, npu(3), npu(3), 3, 0.0), "eps must be positive"),
]
GATED_UNITS = [
    *[
        (lambda call=call, x=x, options=options: call(x, **options), f"npu_.*{rule}")
        for call in (
            torch_npu.npu_swiglu,
            torch_npu.npu_geglu,
            torch_npu.npu_clipped_swiglu,
            lambda x, **options: SWIGLU_BACKWARD(x, x, **options),
            lambda x, **options: GEGLU_GRAD(x, x, x, **options),
        )
        for x, options, rule in (
            (int32(4, 4), {}, "int32"),
            (npu(), {}, r"1 to 8 dimensions, got float32 \[\]"),
            (npu(*[2] * 9), {}, "1 to 8 dimensions"),
            (npu(4, 4), {"dim": 2}, "dim 2 is out of range"),
            (npu(4, 4), {"dim": -3}, "dim -3 is out of range"),
            (npu(4, 5), {}, r"along dim -1 must be even, got float32 \[4, 5\]"),
            (npu(3, 4), {"dim": 0}, "along dim 0 must be even"),
        )
    ],
    (lambda: torch_npu.npu_swiglu(npu(8, 2).t()), r"npu_swiglu: input must be contiguous, got .* \[1, 2\]"),
    (lambda: torch_npu.npu_swiglu(npu(0, 4)), r"npu_swiglu: input is empty: float32 \[0, 4\]"),
    # forward it runs
    (lambda: torch_npu.npu_swiglu(npu(2, 6).requires_grad_()).sum().backward(), "half along dim -1 .* 64 bytes"),
    (lambda: SWIGLU_BACKWARD(npu(0, 16), npu(0, 32)), "npu_swiglu_backward: input is empty"),
    (lambda: SWIGLU_BACKWARD(npu(2, 16), half(2, 32)), r"\(float32, bfloat16\)"),
    (lambda: SWIGLU_BACKWARD(npu(2, 32), npu(2, 32)), r"npu_swiglu_backward: grad_output must .* \[2, 16\], got"),
    (lambda: SWIGLU_BACKWARD(npu(2, 24), npu(2, 48)), "64 bytes, got 24 elements of 4 bytes, 96 bytes"),
    (lambda: SWIGLU_BACKWARD(half(16, 2), half(32, 2), 0), "multiple of 64 bytes, .* 32 bytes"),
    (lambda: torch_npu.npu_geglu(npu(2, 4), approximate=2), "npu_geglu: approximate is 2"),
    (lambda: GEGLU_GRAD(npu(2, 2), npu(2, 4), npu(2, 2), approximate=-1), "npu_geglu_grad: approximate is -1"),
    (lambda: GEGLU_GRAD(npu(2, 2), npu(2, 4), half(2, 2)), r"\(float32, float32, bfloat16\)"),
    (lambda: GEGLU_GRAD(npu(2, 1), npu(2, 4), npu(2, 2)), r"npu_geglu_grad: grad_output must .* \[2, 2\]"),
    (lambda: GEGLU_GRAD(npu(2, 2), npu(2, 4), npu(2, 4)), r"npu_geglu_grad: gelu must .* \[2, 2\]"),
    (lambda: torch_npu.npu_clipped_swiglu(npu(8, 2).t()), "npu_clipped_swiglu: x must be contiguous"),
    (lambda: clipped(int32(2)), r"group_index must be int64 and have 1 dimension, got int32 \[2\]"),
    (lambda: clipped(index([1, 1])), r"int64 and have 1 dimension, got int64 \[1, 2\]"),
    (lambda: clipped(npu(8193, dtype=LONG)), "group_index has 8193 elements; the device takes at most 8192"),
    (lambda: clipped(index(1, 1, 1)[::2]), "group_index must be contiguous"),
    (lambda: clipped(index(-1, 1)), "group_index has a negative element"),
]
ROTATIONS = [
    (lambda: rotary((2, 3, 5), (2, 1, 5)), "npu_rotary_mul: .*even"),
    (lambda: rotary((2, 3, 896), (2, 1, 896)), "below 896"),
    (lambda: rotary((3, 64), (3, 64)), "3 or 4 dimensions"),
    (lambda: rotary((0, 3, 64), (0, 1, 64)), "empty"),
    (lambda: rotary((2, 3, 64), (2, 1, 32)), "head size of x"),
    (lambda: rotary((2, 3, 4, 64), (3, 4, 64)), "the dimensions and the head size"),
    (lambda: rotary((2, 3, 4, 64), (1, 3, 4, 64)), "none of the layouts"),
    (lambda: rotary((2, 3, 64), (2, 1, 64), "quarter"), "half or interleave"),
    (lambda: torch_npu.npu_rotary_mul(npu(2, 3, 8), npu(2, 1, 8), npu(2, 3, 8)), "differ in shape"),
    (lambda: rotary((2, 3, 8, 64), (1, 1, 1, 64)), "none of the layouts"),
    # a decode step: 16 heads for one position
    (lambda: rotary((1, 16, 1, 64), (1, 1, 1, 64)), "B·N <= 8·S"),
    (lambda: rotary((16, 4, 1, 64), (16, 1, 1, 64)), "B·N <= 8·S"),  # though S11D is legal
    (lambda: torch_npu.npu_rotary_mul(half(2, 3, 40, 16), *[half(2, 1, 40, 16)] * 2), "blocks of 32 bytes"),
    (lambda: rotary((1000, 1000, 1, 2), (1000, 1, 1, 2)), "B·N"),
    (lambda: rotary((2, 1000, 2), (2, 1, 2)), "N < 1000"),
    (lambda: rotary((2, 3, 4, 64), (2, 3, 1, 64), "interleave"), "interleave takes cos as"),
    (lambda: rotary((2, 3, 64), (2, 3, 64), "interleave"), "interleave takes cos as"),
    (lambda: rotary((100, 3, 10, 2), (1, 3, 1, 2), "interleave"), "B·N < 1000"),
    (lambda: gradient_of_cos((2, 3, 600, 2), (2, 3, 1, 2)), "B·N <= 1024"),
    (lambda: gradient_of_cos((4, 2, 3, 64), (4, 2, 1, 64)), "B < S"),
    (lambda: rotary((1, 4, 1, 16), (1, 4, 1, 16), rotate=npu(8, 16)), "rotate must be"),
    (lambda: gradient_of_cos((1, 4, 1, 16), (1, 4, 1, 16), rotate=npu(16, 16)), "with rotate there is no gradient"),
    (lambda: torch_npu.npu_apply_rotary_pos_emb(*[half(1, 2, 1, 32)] * 4), "head size of 64 or 128"),
    (lambda: torch_npu.npu_apply_rotary_pos_emb(*[half(1, 2, 2, 64)] * 4), "cos must have the tokens"),
    (lambda: torch_npu.npu_interleave_rope(*[half(1, 1, 2, 32)] * 3), "npu_interleave_rope: .*64"),
    (lambda: mrope(index(4)), "npu_mrope: .*below the 4 rows"),
    (lambda: mrope(index(0), head_size=48), "by 32"),
    (lambda: mrope(index([0], [0], [0]), mrope_section=[4, 6, 6]), "mrope_section must be one of"),
    (
        lambda: mrope(index(*[[0]] * 4), 128, 128, mrope_section=[16] * 4, cache_mode="interleave"),
        "takes three sections",
    ),
    (lambda: mrope(index(0), cache_mode="other"), "cache_mode only support default or interleave"),
    (lambda: kept(index([0, 4])), "npu_kv_rmsnorm_rope_cache: .*below the 4 places"),
    (lambda: kept(index([1, 1])), "twice"),
    (lambda: kept(index(0, 0), cache_mode="PA_NZ"), "cache modes Norm, PA and PA_BNSD"),
]
ATTENTION = [
    (lambda: attention(input_layout="BNDS"), "npu_fusion_attention_v3: .*input_layout must be one of"),
    (lambda: attention(head_num=3), "head_num"),
    (lambda: attention(keep_prob=0.0), "keep_prob"),
    (lambda: attention(sparse_mode=9), "sparse_mode"),
    (lambda: attention(sparse_mode=2, atten_mask=HIDDEN), "upper triangle of 2048"),
    (lambda: attention(sparse_mode=2, atten_mask=HIDDEN[:1, :1].expand(2048, 2048)), "upper triangle of 2048"),
    (lambda: attention(atten_mask=HIDDEN[:2]), "atten_mask must have one of the shapes"),
    (lambda: attention(atten_mask=npu(5, 7)), "atten_mask must be"),
    (lambda: attention(atten_mask=~HIDDEN, next_tockens=0), "keeps positions"),
    (lambda: attention(sink=npu(3)), "sink must have the shape"),
    (lambda: attention(pse=fp16(2, 4, 5, 7)), "pse must be"),
    (lambda: attention(padding_mask=npu(5, 7)), "padding_mask"),
    (lambda: attention(sparse_mode=7), r"sparse_mode must be in .* in the layout BNSD, got 7"),
    (lambda: attention(shapes=((2, 4, 5, 16), (2, 2, 7, 8), (2, 2, 7, 16))), "head sizes must be Dq = Dk >= Dv"),
    (lambda: torch_npu.npu_fusion_attention_v3(RANKS, RANKS, RANKS.half(), 2, "BSH"), "float32, float32, float16"),
    (
        lambda: attention(1, [(1, 4, 16, 16)] * 3, keep_prob=0.5, dropout_mask=P.byte()),
        r"1024 weights, as uint8, got uint8 \[4\]",
    ),
    (lambda: attention(2, pse_type=4), r"npu_fusion_attention_v2: pse_type must be in \[0, 3\]"),
    (lambda: attention(2, pse_type=2, pse=npu(4)), "slopes need as many keys as queries"),
    (lambda: attention(2, sparse_mode=5, prefix=[3], atten_mask=TRIANGLE), "one number for each of 2"),
    (lambda: attention(2, sparse_mode=5, prefix=[1, 2], atten_mask=HIDDEN.expand(2, 1, 5, 7)), r"\[2, 7\]"),
    (lambda: attention(2, query_rope=npu(2, 4, 5, 8), key_rope=npu(2, 2, 7, 8)), "take the layout TND"),
    (lambda: sequences(sparse_mode=7, pre_tokens=3, next_tokens=0), "needs pre_tockens >= 4"),
    (lambda: sequences(sparse_mode=3, actual_seq_kvlen=[2, 7]), "without any key"),
    (lambda: sequences(sparse_mode=3, atten_mask=HIDDEN[:1, :1].expand(2048, 2048)), "upper triangle of 2048"),
    (lambda: sequences(actual_seq_kvlen=[7, 7]), "queries need keys"),
    (lambda: inference([(1, 4, 1, 64), *[(1, 4, 600, 64)] * 2], atten_mask=npu(1, 1, 1, 600) == 0), "keys behind 512"),
    (lambda: inference([(1, 4, 1, 64), *[(1, 4, 6, 64)] * 2], inner_precise=2), "one query takes inner_precise 0 or 1"),
    (lambda: inference(sparse_mode=5), r"sparse_mode must be in \[0, 4\]"),
    (lambda: inference(sparse_mode=3), "needs atten_mask"),
    (lambda: inference(sparse_mode=3, atten_mask=FEW), "upper triangle"),
    (lambda: inference(atten_mask=FEW.expand(2, 4, 3, 5)), "atten_mask must be"),
    (lambda: inference(pse_shift=npu(1, 1, 3, 5)), "pse_shift must be"),
    (lambda: inference(actual_seq_lengths_kv=[5, 6]), r"must be in \[0, 5\]"),
    (lambda: inference(layout="BNSD_SBH"), "input_layout must be one of"),
    (lambda: inference(query_rope=half(2, 4, 3, 64)), "given together"),
    (lambda: inference(heads=8, num_key_value_heads=8), "must have 8 heads"),
    (lambda: latent(48), r"1, 2, 4, \.\.\. 128 heads and one of key, got 48, 1"),
    (lambda: latent(dtype=torch.float32), "query, query_rope, key_rope"),
    (lambda: latent(layout="BSND_BNSD"), "takes the layouts"),
    (lambda: latent(queries=3, sparse_mode=1, atten_mask=HIDDEN), "1, 2, 4"),
    (lambda: latent(atten_mask=HIDDEN), "no mask of two dimensions"),
    (lambda: latent(softmax_lse_flag=True), "no softmax_lse_flag"),
    (lambda: inference([(1, 4, 3, 24)] * 3), "by 16"),
    (lambda: inference([(5, 4, 32)] * 3, layout="TND", actual_seq_lengths=[5], actual_seq_lengths_kv=[5]), "take head"),
    (lambda: inference([(5, 4, 64)] * 3, layout="TND"), "cumulative lengths"),
    (lambda: inference(antiquant_scale=npu(2)), "no form of the operator with antiquant_scale"),
    (
        lambda: torch_npu.npu_fused_infer_attention_score(
            half(2, 4, 3, 64).transpose(1, 2), *[half(2, 5, 4, 64)] * 2, num_heads=4, input_layout="BSND"
        ),
        "query must be contiguous",
    ),
    (lambda: indexed(query=half(2, 5, 65, 128), weights=half(2, 5, 65)), "at most 64 heads"),
    (lambda: indexed(key=half(2, 11, 2, 128)), "one head"),
    (lambda: indexed(weights=half(2, 5, 7)), "weights must be"),
    (lambda: indexed(sparse_count=2049), "sparse_count must be"),
    (lambda: indexed(sparse_mode=1), "sparse_mode must be 0 or 3"),
    (lambda: indexed(layout_query="TND"), "one layout"),
    (lambda: chosen(query=half(2, 5, 3, 512), query_rope=half(2, 5, 3, 64)), "1, 2, 4 to 128 heads"),
    (lambda: chosen(attention_mode=0), "attention_mode must be 2"),
    (lambda: chosen(value=half(2, 9, 1, 512)), "value must be as key"),
    (lambda: chosen(sparse_indices=int32(2, 5, 6)), "sparse_indices must be"),
    (lambda: chosen(sparse_indices=int32(2, 5, 1, 6) * 11), "below the 11 keys"),
    (lambda: chosen(sinks=npu(8)), "no sinks"),
    (lambda: joined(input_layout="BSH"), "input_layout must be"),
    (lambda: joined(cur_attn_out=npu(5, 2, 32)), "of one shape"),
]  # fmt: skip
LOSSES_AND_LAYOUTS = [
    *[
        (lambda trains=trains, options=options: loss(trains, **options), f"npu_cross_entropy_loss: .*{rule}")
        for trains in (False, True)
        for options, rule in (
            ({"target": index(0, 1, 2, 3, 4, 11)}, "reads beyond its memory"),
            ({"target": index(0, 1, 2, 3, 4, -1)}, "reads beyond its memory"),
            ({"target": index(*[0] * 5)}, "target must be"),
            ({"reduction": "max"}, "reduction must be"),
            ({"label_smoothing": 1.0}, "label_smoothing must be in"),
            ({"ignore_index": 11}, "ignore_index must be below"),
            ({"weight": fp16(11)}, "weight must be float32"),
            ({"return_zloss": True}, "zloss is not supported"),
        )
    ],
    (lambda: loss(True, label_smoothing=0.1, reduction="sum"), "with a gradient"),
    (lambda: loss(True, ignore_index=4), "with a gradient"),
    (lambda: torch_npu.npu_slice(RANKS, [0, 2, 0], [2, 2, 4]), "npu_slice: 2 elements from 2 on are not in"),
    (lambda: torch_npu.npu_pad(RANKS, [1, 1]), "npu_pad: paddings must be a pair a dimension"),
    (lambda: torch_npu.npu_bmmV2(RANKS, RANKS.mT, [5]), r"npu_bmmV2: output_sizes \[5\] do not hold \[2, 3, 3\]"),
    (lambda: torch_npu.batch_norm_reduce(npu(3), 1e-5), r"dim input tensor \[self\] must more than 1"),
    (lambda: torch_npu.npu_one_hot(K, 0, 3), "npu_one_hot: num_classes"),
    (lambda: torch_npu.npu_scatter_nd_update(npu(4, 5), index([4], [4]), npu(2, 5)), "inside of"),
    (lambda: torch_npu.npu_scatter_nd_update(npu(4, 5), index([0], [0]), npu(4, 5)), "updates must be"),
    (lambda: torch_npu.scatter_update(npu(2, 4, 8), index(3, 3), npu(2, 2, 8), -2), "updates must be inside of"),
    (lambda: torch_npu.scatter_update(npu(2, 4, 8), index(3), npu(2, 1, 8), -2), r"indices must be \[2\]"),
    (lambda: torch_npu.scatter_update(npu(2, 4, 8), index(3, 3), npu(2, 1, 4), -2), "as data but for"),
    (lambda: torch_npu.scatter_update(npu(2, 4, 8), index(3, 3), npu(2, 1, 8), 0), "axis must be"),
    (lambda: torch_npu.scatter_update(npu(2, 4, 6), index(3, 3), npu(2, 4, 1), -1), "a multiple of 32 bytes"),
    (lambda: torch_npu.scatter_update(npu(2, 4, 8), index(0, 0), npu(2, 0, 8), -2), "must not be empty"),
    (lambda: torch_npu.npu_top_k_top_p(npu(4, 5), P, K * 6), r"npu_top_k_top_p: k must be in \[1, 5\]"),
    (lambda: torch_npu.npu_top_k_top_p(npu(4, 5), P * 2, K), r"p must be in \[0, 1\]"),
    (lambda: torch_npu.npu_scaled_masked_softmax(npu(4, 5), npu(4, 5).bool()), "32 to 4096"),
    (lambda: torch_npu.npu_scaled_masked_softmax(BIG, BIG.bool()), "no source defines"),
    (lambda: torch_npu.npu_apply_adam_w(*[0] * 7, P, P, True, None, out=(P, P, P)), "amsgrad is not supported"),
]  # fmt: skip
PRODUCTS = [
    (lambda: torch_npu.npu_linear(fp16(2, 4), fp16(3, 5)), "npu_linear: needs"),
    (lambda: torch_npu.npu_linear(*[half(2, 4)] * 2), "dtypes"),
    (lambda: torch_npu.npu_linear(fp16(2, 4), fp16(3, 4), fp16(2)), "bias must be"),
    (lambda: torch_npu.npu_transpose_batchmatmul(fp16(2, 3, 8), fp16(2, 8, 16)), "multiples of 16"),
    (lambda: torch_npu.npu_transpose_batchmatmul(fp16(2, 3, 16), fp16(2, 16, 16), batch_split_factor=3), "divide N"),
    (lambda: torch_npu.npu_ffn(fp16(2, 4), fp16(4, 8), fp16(8, 4), "tanh"), "npu_ffn: .*activation must be"),
    (
        lambda: torch_npu.npu_ffn(fp16(2, 4), fp16(2, 4, 8), fp16(2, 8, 4), "relu", expert_tokens=[1, 2]),
        "2 rows in all",
    ),
    (lambda: torch_npu.npu_dynamic_quant(X, smooth_scales=fp16(4)), "smooth_scales must be"),
    (lambda: torch_npu.npu_quant_matmul(A, B, P[:3]), "scale must be"),
    (lambda: torch_npu.npu_quant_matmul(A, B, half(4), output_dtype=5), "no torch.float16 result"),
    (lambda: torch_npu.npu_quant_matmul(A, B, P, bias=P), "no torch.int8 result"),
    (lambda: torch_npu.npu_quant_matmul(A, B, P.long(), offset=P), "int64 scales take no offset and pertoken_scale"),
    (lambda: torch_npu.npu_weight_quant_batchmatmul(X, W, half(4)), "npu_weight_quant_batchmatmul: .*dtypes"),
    (lambda: torch_npu.npu_weight_quant_batchmatmul(X, W, fp16(4), antiquant_group_size=48), "by 32"),
    (lambda: torch_npu.npu_weight_quant_batchmatmul(X, W.int()[:, ::2], fp16(8)), "contiguous, or so transposed"),
    (lambda: torch_npu.npu_quantize(RANKS, npu(3), None, torch.qint8, 2), r"npu_quantize: scales must be \[1\] or"),
    (lambda: torch_npu.npu_quantize(RANKS, npu(4), None, torch.quint8, 2, False), "to int8"),
    (lambda: torch_npu.npu_trans_quant_param(P, round_mode=1), "round_mode 0 only, got 1"),
]  # fmt: skip


TABLES = (ACTIVATIONS_AND_NORMS, GATED_UNITS, ROTATIONS, ATTENTION, LOSSES_AND_LAYOUTS, PRODUCTS, EXPERTS)


@pytest.mark.parametrize(("call", "rule"), [line for table in TABLES for line in table])
def test_what_the_device_refuses_is_refused_with_the_rule(call, rule: str) -> None:
    with pytest.raises((RuntimeError, NotImplementedError), match=rule) as refusal:
        call()
    assert re.search("npu_|batch_norm_|scatter_update", str(refusal.value))
