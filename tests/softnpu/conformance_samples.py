"""Arguments of operators for test_conformance.py, beside those of the cases of test_formulas.py."""

import torch

HALF = torch.bfloat16


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.linspace(0.1, 1, torch.Size(shape).numel()).view(shape).to(dtype)


def norms(dtype: torch.dtype, *shape: int) -> tuple:
    return rows(*shape, dtype=dtype), rows(shape[-1], dtype=dtype)


def attention(dtype: torch.dtype = torch.float32, d_v: int = 8, **options) -> tuple[tuple, dict]:
    q, k, v = (rows(2, n, s, d, dtype=dtype) for n, s, d in ((4, 3, 8), (2, 5, 8), (2, 5, d_v)))
    return (q, k, v, 4, "BNSD"), options


def attention_backward(**options) -> tuple[tuple, dict]:
    (q, k, v, n, layout), _ = attention()
    dy, statistics = rows(2, 4, 3, 8), rows(2, 4, 3, 8)
    saved = {"softmax_max": statistics, "softmax_sum": statistics, "attention_in": dy}
    return (q, k, v, dy, n, layout), saved | options


def grouped(group_type: int, split_item: int = 2, **options) -> dict:
    """Two groups of one and three."""
    options |= {"group_list": torch.tensor([1, 4]), "split_item": split_item, "group_type": group_type}
    return options


def inference(layout: str, q: tuple[int, ...], kv: tuple[int, ...], **options) -> tuple[tuple, dict]:
    """Four heads, of 64, or two of them for key and value."""
    return tuple(rows(*shape, dtype=HALF) for shape in (q, kv, kv)), {"input_layout": layout, "num_heads": 4} | options


def inference_v2(layout: str, q: tuple[int, ...], kv: tuple[int, ...], **options) -> tuple[tuple, dict]:
    args, given = inference(layout, q, kv, **options)
    return args, {"num_query_heads": given.pop("num_heads")} | given


def halves(*shapes: tuple[int, ...]) -> tuple:
    return tuple(rows(*shape, dtype=HALF) for shape in shapes)


IDS = torch.tensor([0, 2, 2, 1])
EXPERTS = torch.tensor([[0, 2], [2, 1]])
SLOTS = torch.tensor([0, 2, 3, 1], dtype=torch.int32)
SLOTS6 = torch.tensor([0, 3, 1, 4, 2, 5], dtype=torch.int32)
EXPERTS6 = torch.tensor([[1, 0], [2, 1], [0, 2]], dtype=torch.int32)
MAP = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1]], dtype=torch.bool)
MAPPED = torch.tensor([0, 2, 3, 4, 1, 5], dtype=torch.int32)
MAPPED_PADDED = torch.tensor([0, 2, 0, 1, 1, 0, 2, 0], dtype=torch.int32)
LATENTS = halves((1, 1, 2, 576), (512,), (1, 1, 2, 64), (1, 1, 2, 64))
CHOSEN = torch.tensor([0, 2, -1], dtype=torch.int32).expand(2, 3, 1, 3).contiguous()
SPARSE = halves((2, 3, 8, 512), (2, 5, 1, 512), (2, 5, 1, 512))
ROTATED = {"query_rope": rows(2, 3, 8, 64, dtype=HALF), "key_rope": rows(2, 5, 1, 64, dtype=HALF), "attention_mode": 2}
ENDS = {"actual_seq_lengths": [3, 5], "actual_seq_lengths_kv": [3, 5]}
ENDS_V2 = {"actual_seq_qlen": [3, 5], "actual_seq_kvlen": [3, 5]}
WITHOUT_QUERIES = {
    "actual_seq_lengths_query": torch.tensor([0, 3, 3], dtype=torch.int32),
    "actual_seq_lengths_key": torch.tensor([1, 4, 5], dtype=torch.int32),
    "layout_query": "TND",
    "layout_key": "TND",
}
SAMPLES: dict[str, list[tuple[tuple, dict]]] = {
    "npu_add_rms_norm": [((x, x, gamma), {}) for x, gamma in (norms(torch.float32, 2, 8), norms(HALF, 2, 3, 8))],
    "npu_add_rms_norm_cast": [((x, x, gamma), {}) for x, gamma in (norms(HALF, 2, 8), norms(torch.half, 2, 3, 8))],
    "npu_add_rms_norm_v2": [((x, x, gamma), {}) for x, gamma in (norms(torch.float32, 2, 8), norms(HALF, 2, 3, 8))],
    "npu_add_rms_norm_v2_functional": [((x, x, gamma), {}) for x, gamma in (norms(HALF, 2, 8), norms(HALF, 2, 3, 8))],
    "npu_add_layer_norm": [((x, x, g, g), {}) for x, g in (norms(HALF, 2, 8), (rows(2, 3, 8, dtype=HALF), rows(8)))],
    "npu_deep_norm": [((x, x, g, g), {}) for x, g in (norms(HALF, 2, 8), (rows(2, 3, 8), rows(3, 8)))],
    "npu_silu_": [((rows(8),), {})],
    "npu_gelu_mul": [((rows(2, 8),), {}), ((rows(2, 3, 4, dtype=HALF),), {"approximate": "tanh"})],
    "npu_apply_rotary_pos_emb": [((rows(2, 3, 4, 64), rows(2, 3, 2, 64), rows(2, 3, 1, 64), rows(2, 3, 1, 64)), {})],
    "npu_interleave_rope": [
        (halves((2, 4, 3, 64), (2, 1, 1, 64), (2, 1, 1, 64)), {}),
    ],
    "npu_mrope": [((IDS, rows(4, 128), rows(4, 64), rows(3, 32), 64), {"rotary_mode": "interleaved"})],
    "npu_kv_rmsnorm_rope_cache": [
        ((*LATENTS, torch.tensor([[2, 0]]), *halves((1, 1, 3, 64), (1, 1, 3, 512))), {}),
    ],
    "npu_fusion_attention": [attention(), attention(HALF), attention(d_v=4), attention(scale=0.5, keep_prob=0.5)],
    "npu_fusion_attention_grad": [attention_backward(), attention_backward(scale_value=0.5)],
    "npu_fusion_attention_v2": [attention(), attention(HALF), attention(sink=rows(4))],
    "npu_fusion_attention_grad_v2": [attention_backward(), attention_backward(sink=rows(4))],
    "npu_fusion_attention_v3": [attention(), attention(HALF), attention(d_v=4), attention(sink=rows(4))],
    "npu_fusion_attention_grad_v3": [attention_backward(), attention_backward(sink=rows(4))],
    "npu_fused_linear_online_max_sum": [  # has no meta kernel
        ((*halves((9, 8), (20, 8)), torch.arange(15, 24), 16, 20, is_returned), {}) for is_returned in (True, False)
    ],
    "npu_lightning_indexer": [
        ((*halves((2, 3, 8, 128), (2, 5, 1, 128)), rows(2, 3, 8)), {"sparse_count": 4, "return_value": True}),
        (halves((2, 3, 8, 128), (2, 5, 1, 128), (2, 3, 8)), {"sparse_count": 4, "sparse_mode": 0}),
        (halves((3, 8, 128), (5, 1, 128), (3, 8)), {"sparse_count": 4, **WITHOUT_QUERIES}),
    ],
    "npu_lightning_indexer_grad": [
        ((*halves((2, 3, 8, 128), (2, 5, 1, 128), (2, 3, 1, 3)), CHOSEN, *halves((2, 3, 8))), {"sparse_mode": 0}),
    ],
    "npu_sparse_flash_attention": [
        ((*SPARSE, CHOSEN, 0.1), ROTATED | {"return_softmax_lse": is_returned}) for is_returned in (True, False)
    ],
    "npu_sparse_flash_attention_grad": [
        ((*SPARSE, CHOSEN, *halves((2, 3, 8, 512), (2, 3, 8, 512)), *[rows(2, 1, 3, 8)] * 2, 0.1, 1), ROTATED)
    ],
    "npu_fused_infer_attention_score": [
        inference("BSH", (2, 3, 256), (2, 5, 128), num_key_value_heads=2),
        inference("BNSD_BSND", (2, 4, 3, 64), (2, 4, 5, 64), softmax_lse_flag=True),
        inference("BSND_NBSD", (2, 3, 4, 64), (2, 5, 4, 64), actual_seq_lengths_kv=[5, 2]),
        inference("TND", (5, 4, 64), (5, 4, 64), softmax_lse_flag=True, **ENDS),
    ],
    "npu_fused_infer_attention_score_v2": [
        inference_v2("BSH", (2, 3, 256), (2, 5, 256), return_softmax_lse=True),
        inference_v2("NTD_TND", (4, 5, 64), (4, 5, 64), learnable_sink=rows(4, dtype=HALF), **ENDS_V2),
    ],
    "npu_fused_infer_attention_score.out": [
        inference("BSH", (2, 3, 256), (2, 5, 256), out=[torch.empty(2, 3, 256, dtype=HALF), torch.empty(0)])
    ],
    "npu_fused_infer_attention_score_v2.out": [
        inference_v2("BSH", (2, 3, 256), (2, 5, 256), out=[torch.empty(2, 3, 256, dtype=HALF), torch.empty(0)])
    ],
    "_npu_fused_infer_attention_score_get_max_workspace": [inference("BSH", (2, 3, 256), (2, 5, 256))],
    "_npu_fused_infer_attention_score_v2_get_max_workspace": [inference_v2("BSH", (2, 3, 256), (2, 5, 256))],
    "_npu_fused_infer_attention_score_infer_output": [
        (halves((2, 3, 256), (2, 5, 128)), {"num_heads": 4, "num_key_value_heads": 2}),
        (halves((2, 4, 3, 64), (2, 4, 5, 64)), {"num_heads": 4, "input_layout": "BNSD_BSND", "softmax_lse_flag": True}),
    ],
    "_npu_fused_infer_attention_score_v2_infer_output": [
        (halves((5, 4, 64), (6, 4, 64)), {"num_query_heads": 4, "input_layout": "TND", "return_softmax_lse": True}),
    ],
    "npu_fusion_attention_v3.out": [attention(out=[rows(2, 4, 3, 8), rows(2, 4, 3, 8), rows(2, 4, 3, 8)])],
    "npu_fusion_attention_grad_v3.out": [
        attention_backward(out=[rows(2, 4, 3, 8), rows(2, 2, 5, 8), rows(2, 2, 5, 8)])
    ],
    "_npu_fusion_attention_v3_get_max_workspace": [attention()],
    "_npu_fusion_attention_grad_v3_get_max_workspace": [attention_backward()],
    "_npu_fusion_attention_v3_infer_output": [attention(), attention(d_v=4)],
    "_npu_fusion_attention_grad_v3_infer_output": [(attention()[0][:3], {})],
    "batch_norm_reduce": [((rows(2, 3, 4), 1e-5), {})],
    "batch_norm_gather_stats_update": [
        ((rows(2, 3, 4), rows(2, 3), rows(2, 3), rows(3), rows(3), 0.1, 1e-5, torch.tensor([8.0, 8.0])), {})
    ],
    "batch_norm_stats": [((rows(2, 3, 4), 1e-5), {})],
    "batch_norm_elemt": [((rows(2, 3, 4, dtype=HALF), rows(3), rows(3), rows(3), rows(3), 1e-5), {})],
    "batch_norm_elemt.out": [
        ((rows(2, 3, 4), None, None, rows(3), rows(3), 1e-5), {"out": torch.empty(2, 3, 4)}),
    ],
    "batch_norm_backward_reduce": [
        ((rows(2, 3, 4), rows(2, 3, 4), rows(3), rows(3), rows(3), *wanted), {})
        for wanted in ((True, True, True), (False, True, False))
    ],
    "batch_norm_backward_elemt": [
        ((*[rows(2, 3, 4, dtype=HALF)] * 2, *[rows(3)] * 5, torch.tensor([8, 8], dtype=torch.int32)), {})
    ],
    "batch_norm_gather_stats_with_counts": [
        ((rows(2, 3, 4), rows(2, 3), rows(2, 3), rows(3), rows(3), 0.1, 1e-5, torch.tensor([8.0, 8.0])), {})
    ],
    "npu_layer_norm_eval": [((rows(2, 3, 4, dtype=HALF), [4]), {}), ((rows(2, 3, 4), [3, 4], rows(3, 4)), {})],
    "npu_grouped_matmul_add": [
        ((rows(6, 3), rows(4, 3, dtype=HALF), rows(4, 3, dtype=HALF), torch.tensor([1, 4])), {}),
    ],
    "npu_grouped_matmul_add_": [
        ((rows(2, 3, 5), rows(4, 3, dtype=HALF), rows(4, 5, dtype=HALF), torch.tensor([1, 4])), {}),
    ],
    "npu_quantize": [
        ((rows(2, 3), rows(3), torch.ones(3, dtype=torch.int32), 12), {}),
        ((rows(2, 3, dtype=HALF), rows(1, dtype=HALF), None, 12, -1, False), {}),
        ((rows(2, 3, dtype=HALF), rows(2, 1, dtype=HALF), None, 12, -2, False), {}),
    ],
    "npu_trans_quant_param": [((rows(3),), {}), ((rows(1, 3), rows(1, 3)), {}), ((rows(1), rows(3)), {})],
    "npu_dynamic_quant_asymmetric": [((rows(2, 3, 4, dtype=HALF),), {})],
    "npu_transpose": [((rows(2, 3, 4), [2, 0, 1]), {})],
    "npu_reshape": [((rows(2, 3, 4), [4, 6]), {})],
    "npu_slice": [((rows(2, 3, 4), [0, 1, 1], [2, 2, -1]), {})],
    "npu_pad": [((rows(2, 3), [1, 0, 0, 2]), {})],
    "npu_broadcast": [((rows(2, 1, 3), [2, 4, 3]), {})],
    "npu_confusion_transpose": [
        ((rows(2, 3, 4), [2, 0, 1], [4, 6], True), {}),
        ((rows(2, 12), [2, 0, 1], [2, 3, 4], False), {}),
    ],
    "npu_confusion_transpose_backward": [
        ((rows(4, 6), [2, 0, 1], [2, 3, 4], False), {}),
        ((rows(4, 2, 3), [2, 0, 1], [2, 12], True), {}),
    ],
    "npu_max.dim": [((rows(2, 3), 1), {}), ((rows(2, 3), 0, True), {})],
    "npu_min.dim": [((rows(2, 3), 1), {}), ((rows(2, 3), 0, True), {})],
    "npu_max_backward": [((rows(2), 1, torch.tensor([0, 2], dtype=torch.int32), [2, 3], False), {})],
    "npu_min_backward": [((rows(2, 1), 1, torch.tensor([[0], [2]], dtype=torch.int32), [2, 3], True), {})],
    "npu_bmmV2": [((rows(2, 3, 4), rows(2, 4, 5), []), {})],
    "one_": [((rows(2, 3),), {})],
    "npu_prompt_flash_attention": [
        inference("BSH", (2, 3, 256), (2, 5, 256)),
        inference("BNSD_BSND", (2, 4, 3, 64), (2, 4, 5, 64)),
    ],
    "npu_incre_flash_attention": [inference("BSH", (2, 1, 256), (2, 5, 256), actual_seq_lengths=[4])],
    "npu_clipped_swiglu": [
        ((rows(4, 8),), {}),
        ((rows(2, 3, 8, dtype=HALF),), {"group_index": torch.tensor([1, 2]), "interleaved": False}),
        ((rows(2, 4, 3),), {"dim": 1}),
    ],
    "npu_moe_token_permute": [
        ((rows(2, 8), EXPERTS), {}),
        ((rows(2, 8, dtype=HALF), EXPERTS.int(), 3), {}),
        ((rows(4, 8), IDS, -1), {}),
    ],
    "npu_moe_token_permute_grad": [((rows(2, 8), rows(4, 8), EXPERTS, SLOTS), {})],
    "npu_moe_token_permute_grad_v2": [
        ((rows(4, 8), SLOTS, 2, torch.float32, 2), {}),
        ((rows(3, 8, dtype=HALF), SLOTS, 4, HALF, 1), {}),
    ],
    # with probs: without them torch_npu's meta kernel returns permuted_tokens where the operator returns nothing
    "_npu_moe_token_unpermute": [
        ((rows(4, 8), SLOTS, rows(2, 2)), {}),
        ((rows(3, 8, dtype=HALF), SLOTS, rows(2, 2)), {}),
    ],
    "npu_moe_token_unpermute": [
        ((rows(4, 8), SLOTS, rows(2, 2)), {}),
        ((rows(4, 8, dtype=HALF), SLOTS), {}),
    ],
    "npu_moe_token_unpermute_grad": [
        ((rows(4, 8), rows(4, 8), SLOTS), {}),
        ((rows(4, 8, dtype=HALF), rows(2, 8, dtype=HALF), SLOTS, rows(2, 2)), {}),
    ],
    "npu_moe_token_unpermute_grad_v2": [
        ((rows(4, 8), SLOTS, 3, torch.float32), {}),
        ((rows(2, 8, dtype=HALF), SLOTS, 4, HALF, rows(2, 2)), {"permuted_tokens": rows(4, 8, dtype=HALF)}),
    ],
    "npu_grouped_matmul": [
        (([rows(4, 8)], [rows(2, 8, 3)]), grouped(0)),
        (([rows(4, 8, dtype=HALF)], [rows(2, 3, 8, dtype=HALF).mT]), grouped(0, split_item=3, bias=[rows(2, 3)])),
        (([rows(4, 8, dtype=HALF)], [rows(8, 3, dtype=HALF)] * 2), grouped(0)),
        (([*halves((1, 8), (3, 8))], [*halves((8, 3), (8, 3))]), grouped(0)),
        (([rows(4, 8).t()], [rows(4, 3)]), grouped(2)),
        (([*halves((2, 4, 8), (3, 5))], [*halves((8, 3), (5, 2))]), {"group_type": -1}),
        (
            ([torch.ones(4, 8, dtype=torch.int8)], [torch.ones(2, 8, 3, dtype=torch.int8)]),
            grouped(0, scale=[rows(2, 3, dtype=HALF)], output_dtype=15),
        ),
    ],
    # split_item 1: with 0 and one x, torch_npu's meta kernel returns one tensor instead of one a group
    "npu_grouped_matmul.List": [
        (([rows(4, 8, dtype=HALF)], [rows(8, 3, dtype=HALF)] * 2), {"group_list": [1, 4], "split_item": split})
        for split in (1, 2, 3)
    ],
    "npu_moe_gating_top_k_softmax": [
        ((rows(3, 6),), {}),
        ((rows(2, 3, 6, dtype=HALF), torch.ones(2, 3, dtype=torch.bool), 2), {}),
        ((rows(3, 6), None, 0), {}),
    ],
    "npu_moe_gating_top_k_softmax_v2": [
        ((rows(3, 6),), {"k": 2, "output_softmax": True}),
        ((rows(2, 3, 6, dtype=HALF),), {"k": 2, "renorm": 1}),
    ],
    "npu_moe_gating_top_k": [
        ((rows(3, 8), 2), {"out_flag": True}),
        ((rows(3, 8, dtype=HALF), 2), {"bias": rows(8, dtype=HALF), "k_group": 2, "group_count": 4, "norm_type": 1}),
    ],
    "npu_moe_gating_top_k_backward": [  # has no meta kernel
        ((rows(3, 8), rows(3, 2, dtype=HALF), torch.tensor([[0, 1]] * 3, dtype=torch.int32)), {"norm_type": 1})
    ],
    "npu_moe_token_permute_with_routing_map": [
        ((rows(3, 8), MAP), {"num_out_tokens": 6}),
        ((rows(3, 8, dtype=HALF), MAP), {"num_out_tokens": 9, "probs": rows(3, 4), "drop_and_pad": True}),
    ],
    "npu_moe_token_permute_with_routing_map_grad": [
        ((rows(6, 8), None, MAPPED, MAP, 4, 3, False), {}),
        ((rows(8, 8), rows(8), MAPPED_PADDED, MAP, 4, 3, True), {}),
    ],
    "_npu_moe_token_unpermute_with_routing_map": [
        ((rows(6, 8), MAPPED, [3, 8]), {"routing_map": MAP}),
        ((rows(8, 8), MAPPED_PADDED, [3, 8]), {"probs": rows(3, 4), "routing_map": MAP, "drop_and_pad": True}),
    ],
    "npu_moe_token_unpermute_with_routing_map": [((rows(6, 8), MAPPED, [3, 8]), {"routing_map": MAP})],
    "npu_moe_token_unpermute_with_routing_map_grad": [
        ((rows(3, 8), MAPPED, MAPPED, MAP, rows(6, 8), rows(3, 4), False, [3, 8]), {}),
        ((rows(3, 8), MAPPED, MAPPED, MAP, None, None, False, [3, 8]), {}),
    ],
    "npu_moe_init_routing": [((rows(3, 8), SLOTS6.view(3, 2), EXPERTS6, n), {}) for n in (2, 5)],
    "npu_moe_init_routing_v2": [
        (
            (rows(2, 8, dtype=HALF), EXPERTS.int()),
            {"expert_num": 3, "expert_tokens_num_type": kind, "expert_tokens_num_flag": True} | options,
        )
        for kind, options in (
            (1, {}),
            (1, {"active_expert_range": [1, 3], "row_idx_type": 1}),
            (2, {"active_num": 4}),
            (1, {"quant_mode": 1, "scale": rows(1, 8)}),
            (1, {"drop_pad_mode": 1, "expert_capacity": 1}),
        )
    ],
    "npu_moe_finalize_routing": [
        ((rows(4, 8), None, None, None, None, SLOTS, None), {}),
        ((rows(4, 8), rows(2, 8), rows(2, 8), rows(3, 8), rows(2, 2), SLOTS, EXPERTS.int(), 2), {}),
        ((rows(3, 2, 8, dtype=HALF), None, None, None, rows(2, 2), SLOTS, None), {"drop_pad_mode": 3}),
    ],
    "npu_moe_re_routing": [
        ((rows(6, 8, dtype=HALF), torch.tensor([[1, 2], [2, 1]])), {}),
        ((rows(6, 8).char(), torch.tensor([[1, 2], [2, 1]])), {"per_token_scales": rows(6)}),
    ],
    "npu_moe_compute_expert_tokens": [((SLOTS.sort().values, 5), {})],
    "npu_linear": [((rows(3, 8), rows(4, 8), rows(4)), {}), ((rows(3, 8).half(), rows(4, 8).half()), {})],
    "npu_ffn": [
        ((rows(2, 3, 8, dtype=HALF), rows(8, 16, dtype=HALF), rows(16, 8, dtype=HALF), "silu"), {}),
        ((rows(5, 8).half(), rows(2, 8, 4).half(), rows(2, 4, 8).half(), "relu"), {"expert_tokens": [2, 3]}),
    ],
    "npu_scaled_masked_softmax": [((rows(2, 1, 32, 64, dtype=HALF), torch.zeros(32, 64, dtype=torch.bool), 0.5), {})],
    "npu_scaled_masked_softmax_backward": [
        ((rows(2, 1, 32, 64), rows(2, 1, 32, 64), torch.zeros(32, 64, dtype=torch.bool), 0.5, False), {})
    ],
    "npu_dynamic_quant": [
        ((rows(3, 8, dtype=HALF),), {}),
        (
            (rows(2, 2, 8, dtype=HALF),),
            {"smooth_scales": rows(2, 8, dtype=HALF), "group_index": torch.tensor([1, 4], dtype=torch.int32)},
        ),
    ],
    "npu_quant_matmul": [
        ((rows(3, 8).char(), rows(8, 4).char(), rows(4)), options)
        for options in ({}, {"output_dtype": 5}, {"output_dtype": 15, "pertoken_scale": rows(3), "bias": rows(4)})
    ],
    "npu_weight_quant_batchmatmul": [((rows(3, 8, dtype=HALF), rows(8, 4).char(), rows(1, 4, dtype=HALF)), {})],
    "npu_apply_adam_w.out": [
        ((0.9, 0.9, 0.1, 0.1, 0.9, 0.9, 0.1, rows(4), None, None, None), {"out": [rows(4), rows(4), rows(4)]})
    ],
    "npu_apply_adam.out": [
        ((0.9, 0.9, 0.1, 0.9, 0.9, 0.1, rows(4), False, True), {"out": [rows(4), rows(4), rows(4)]})
    ],
    "npu_one_hot": [((IDS,), {"depth": 3})],
    "npu_scatter_nd_update": [((rows(4, 5, 6), torch.tensor([[0, 1], [2, 3]]), rows(2, 6)), {})],
    "npu_scatter_nd_update_": [((rows(4, 5, 6), torch.tensor([[0], [3]]), rows(2, 5, 6)), {})],
    "npu_top_k_top_p": [((rows(3, 8, dtype=HALF), rows(3, dtype=HALF), SLOTS[1:]), {})],
    "npu_ring_attention_update": [
        ((rows(5, 2, 16), *[rows(2, 4, 5, 8)] * 2, rows(5, 2, 16), *[rows(2, 4, 5, 8)] * 2), {}),
        (
            (rows(5, 2, 16, dtype=HALF), *[rows(5, 2, 8)] * 2, rows(5, 2, 16, dtype=HALF), *[rows(5, 2, 8)] * 2),
            {"actual_seq_qlen": torch.tensor([2, 5]), "input_layout": "TND", "input_softmax_layout": "TND"},
        ),
    ],
    "_npu_dropout_gen_mask.Tensor": [((rows(3), [3, 50], 0.5, 1, 4), {})],
    "_npu_dropout": [((rows(3, 50), 0.5), {}), ((rows(2, dtype=HALF), 0.0), {})],
    "npu_dropout_backward": [((rows(2, 3), torch.zeros(16, dtype=torch.uint8), 0.5), {})],
    "npu_dtype_cast": [((rows(3), 15), {}), ((rows(3, dtype=HALF), 6), {"input_dtype": 15})],
    "npu_dtype_cast_backward": [((rows(3, dtype=HALF), torch.float32), {})],
    "_npu_dtype_cast": [((rows(3), HALF), {})],
    "_npu_dtype_cast_backward": [((rows(3, dtype=HALF), torch.float32), {})],
    "l1_loss_backward": [((rows(2, 3), rows(2, 3), rows(2, 3), 0), {}), ((rows(1)[0], rows(2, 3), rows(2, 3), 1), {})],
    "kl_div_backward": [((rows(2, 3), rows(2, 3), rows(2, 3), 0), {"log_target": True})],
    "kl_div_target_backward": [((rows(2, 3), rows(2, 3), rows(2, 3), 0), {"log_target": True})],
    "npu_binary_cross_entropy_with_logits_backward": [((rows(2, 3), rows(2, 3), rows(2, 3), None, rows(3), 0), {})],
    "repeat_interleave_backward_int": [((rows(4, 3), rows(2, 3), 2, 0), {}), ((rows(12), rows(2, 3), 2), {})],
    "repeat_interleave_backward_tensor": [((rows(4, 3), rows(2, 3), torch.tensor([1, 3]), 0), {})],
    "npu_renorm_backward": [((rows(3, 4), rows(3, 4), 2.0, 0, 0.5), {})],
    "matmul_double_backward": [((rows(2, 3), rows(3, 4), rows(2, 4), rows(2, 3), rows(3, 4), [True] * 3), {})],
    "matmul_backward": [
        ((rows(2, 4), rows(2, 3), rows(3, 4), [True, True]), {}),
        ((rows(2), rows(2, 3), rows(3), [True] * 2), {}),
    ],
    "histc": [((IDS,), {"bins": 4, "max": 3})],
    "histc.out": [((IDS, 4, 0, 3), {"out": torch.empty(4, dtype=torch.int64)})],
    "mm.dtype": [((rows(2, 3, dtype=HALF), rows(3, 4, dtype=HALF), torch.float32), {})],
    "bmm.dtype": [((rows(2, 2, 3, dtype=HALF), rows(2, 3, 4, dtype=HALF), torch.float32), {})],
    "addmm.dtype": [((rows(4), rows(2, 3, dtype=HALF), rows(3, 4, dtype=HALF), torch.float32), {"beta": 2})],
    "baddbmm.dtype": [((rows(2, 2, 4), rows(2, 2, 3, dtype=HALF), rows(2, 3, 4, dtype=HALF), torch.float32), {})],
    "_thnn_fused_lstm_cell": [((rows(2, 12), rows(2, 12), rows(2, 3), rows(12), rows(12)), {})],
    "_thnn_fused_lstm_cell_backward_impl": [((rows(2, 3), rows(2, 3), rows(2, 3), rows(2, 3), rows(2, 12), True), {})],
    "_softmax": [((rows(2, 3), 1, False), {}), ((rows(2, 3, dtype=HALF), 1, False), {})],
    "_softmax.out": [((rows(2, 3), 1, False), {"out": torch.empty(2, 3)})],
    "_log_softmax": [((rows(2, 3), 1, False), {}), ((rows(2, 3, dtype=HALF), 1, False), {})],
    "_log_softmax.out": [((rows(2, 3), 1, False), {"out": torch.empty(2, 3)})],
    "_softmax_backward_data": [((rows(2, 3), rows(2, 3), 1, torch.float32), {})],
    "_softmax_backward_data.out": [((rows(2, 3), rows(2, 3), 1, torch.float32), {"grad_input": torch.empty(2, 3)})],
    "_log_softmax_backward_data": [((rows(2, 3), rows(2, 3), 1, torch.float32), {})],
    "_log_softmax_backward_data.out": [((rows(2, 3), rows(2, 3), 1, torch.float32), {"out": torch.empty(2, 3)})],
    "put_": [((rows(2, 3), torch.tensor([0, 4]), rows(2)), {}), ((rows(2, 3), torch.tensor([4]), rows(1), True), {})],
}
