"""List the operators of torch_npu that the software device refuses, by the reason why.

An operator gets its formula when somebody uses it and its sources say what it computes. A test holds this list and the
operators of the release against each other.
"""

from __future__ import annotations

UNWRITTEN = "nobody has written its formula yet"
REFUSED: dict[str, str] = {
    "it exchanges data with other cards inside the operator": """
        _npu_distribute_barrier attention_worker_scheduler attention_worker_scheduler_ ffn_worker_scheduler
        ffn_worker_scheduler_ npu_all_gather_base_mm npu_all_gather_quant_mm npu_all_to_all_matmul
        npu_all_to_all_quant_matmul npu_alltoallv_gmm npu_alltoallv_quant_gmm npu_attention_to_ffn
        npu_attention_worker_combine npu_ffn_to_attention npu_ffn_worker_batching npu_gmm_alltoallv
        npu_matmul_all_to_all npu_mm_all_reduce_base npu_mm_reduce_scatter_base npu_moe_distribute_combine
        npu_moe_distribute_combine_add_rms_norm npu_moe_distribute_combine_v2 npu_moe_distribute_dispatch
        npu_moe_distribute_dispatch_v2 npu_moe_update_expert npu_quant_gmm_alltoallv npu_quant_matmul_all_to_all
        npu_quant_mm_reduce_scatter""",
    "it is for Ascend 950, and the software device is a 910B": """
        _npu_swiglu_backward_mx_quant_with_dual_axis npu_add_quant_matmul npu_add_quant_matmul_
        npu_add_rms_norm_dynamic_mx_quant npu_anti_mx_quant npu_dynamic_block_mx_quant
        npu_dynamic_dual_level_mx_quant npu_dynamic_mx_quant npu_dynamic_mx_quant_with_dual_axis
        npu_fused_causal_conv1d npu_fused_causal_conv1d_v2 npu_grouped_dynamic_block_quant
        npu_grouped_dynamic_mx_quant npu_masked_causal_conv1d npu_masked_causal_conv1d_backward npu_mhc_post
        npu_mhc_post_backward npu_mhc_pre npu_mhc_pre_backward npu_mhc_sinkhorn npu_mhc_sinkhorn_backward
        npu_rms_norm_dynamic_mx_quant npu_swiglu_mx_quant npu_swiglu_mx_quant_with_dual_axis
        npu_transpose_quant_batchmatmul""",
    "it finds boxes in images, which no model of transformers does with it": """
        _npu_ciou npu_anchor_response_flags npu_batch_nms npu_bounding_box_decode npu_bounding_box_encode npu_ciou
        npu_ciou_backward npu_deformable_conv2d npu_deformable_conv2dbk npu_diou npu_diou_backward npu_giou
        npu_giou_backward npu_grid_assign_positive npu_iou npu_nms_rotated npu_nms_v4 npu_nms_with_mask
        npu_normalize_batch npu_ps_roi_pooling npu_ps_roi_pooling_backward npu_ptiou npu_random_choice_with_mask
        npu_roi_align npu_roi_alignbk npu_rotated_box_decode npu_rotated_box_encode npu_rotated_iou
        npu_rotated_overlaps npu_sub_sample npu_yolo_boxes_encode""",
    "it is an older form of an operator of torch, which works": """
        _conv_depthwise2d_backward _dropout_with_byte_mask _dropout_with_byte_mask_backward _gru_npu
        _gru_npu_backward _lstm_npu _lstm_npu_backward _npu_index_add _npu_index_add_ _quantize_per_channel_impl.out
        _quantize_per_tensor_impl.out dropout_with_byte_mask npu_batch_gather_matmul npu_batch_gather_matmul_
        npu_bmm_v2_mat1_backward npu_bmm_v2_mat2_backward npu_broadcast.out npu_conv2d npu_conv2d.out
        npu_conv2d_backward npu_conv3d npu_conv3d.out npu_conv3d_backward npu_conv_transpose2d
        npu_conv_transpose2d_backward npu_conv_transpose3d_backward npu_convolution npu_convolution_backward
        npu_convolution_transpose npu_convolution_transpose_backward npu_dropout_do_mask npu_dropout_with_add_softmax
        npu_dropout_with_add_softmax_backward npu_dtype_cast_ npu_gru npu_gru_backward npu_indexing npu_indexing.out
        npu_layernorm_grad npu_lstm npu_lstm_backward npu_lstm_cell npu_lstm_cell_backward npu_lstm_data
        npu_lstm_data_backward npu_reshape.out npu_scatter npu_sim_exponential_ npu_slice.out
        npu_softmax_cross_entropy_with_logits npu_softmax_cross_entropy_with_logits_backward npu_sort_v2
        npu_sort_v2.out npu_stride_add npu_stride_copy npu_stride_copy.out npu_transpose.out npu_view_copy
        slow_conv_dilated2d_backward slow_conv_transpose2d_backward""",
    "it reads or changes the state of a card, or memory of its own format, not numbers": """
        _amp_foreach_non_finite_check _npu_matmul_abft_verify _npu_silent_check _npu_silent_check_v2
        _npu_silent_check_v3 npu_alloc_float_status npu_clear_float_status npu_get_float_status npu_hans_decode.out
        npu_hans_encode.out npu_matmul_compress_dequant npu_prefetch obfuscation_calculate obfuscation_finalize
        print_npugraph_tensor save_npugraph_tensor save_npugraph_tensor.tensor_list set_op_timeout_ms
        super_kernel_scope_begin super_kernel_scope_end""",
    f"{UNWRITTEN}: it is quantised": """
        _npu_rms_norm_backward_quant npu_add_quant_gmm npu_add_quant_gmm_ npu_add_rms_norm_dynamic_quant
        npu_add_rms_norm_quant npu_anti_quant npu_convert_weight_to_int4pack npu_dequant_bias
        npu_dequant_rope_quant_kvcache npu_dequant_swiglu_quant npu_dual_level_quant_matmul npu_dynamic_block_quant
        npu_gelu_quant npu_group_quant npu_grouped_matmul_finalize_routing npu_grouped_matmul_swiglu_quant
        npu_grouped_matmul_swiglu_quant_v2 npu_ifmr npu_kronecker_quant npu_kv_quant_sparse_flash_attention
        npu_moe_init_routing_quant npu_quant_conv2d npu_quant_fusion_attention npu_quant_fusion_attention_backward
        npu_quant_grouped_matmul_dequant npu_quant_lightning_indexer npu_quant_matmul_dequant npu_quant_matmul_gelu
        npu_quant_matmul_reduce_sum npu_quant_max npu_quant_scatter npu_quant_scatter_ npu_rms_norm_quant
        npu_rms_norm_quant_v2 npu_rope_quant_kvcache npu_rotate_quant npu_swiglu_group_quant
        npu_swiglu_group_quant_backward npu_swiglu_quant npu_weight_quant_preprocess""",
    f"{UNWRITTEN}: it is an attention of its own kind, or its cache": """
        npu_advance_step_flashattn npu_attention_update npu_block_sparse_attention
        npu_block_sparse_attention_backward npu_chunk_gated_delta_rule npu_dense_lightning_indexer_grad_kl_loss
        npu_dense_lightning_indexer_softmax_lse npu_fused_attention_layernorm_qkv_fwd npu_fused_attention_qkv_grad
        npu_fused_attention_score npu_fused_attention_score_backward npu_fused_attention_score_fwd
        npu_fused_attention_score_grad npu_fused_floyd_attention npu_fused_floyd_attention_backward
        npu_gather_pa_kv_cache npu_gather_pa_kv_cache_functional npu_kv_rmsnorm_rope_cache_v2
        npu_kv_rmsnorm_rope_cache_v2_functional npu_mla_prolog
        npu_mla_prolog_v2 npu_mla_prolog_v3 npu_mla_prolog_v3_functional npu_multi_head_attention
        npu_multi_head_attention_backward npu_nsa_compress npu_nsa_compress_attention
        npu_nsa_compress_attention_infer npu_nsa_compress_grad npu_nsa_compress_infer.cache npu_nsa_select_attention
        npu_nsa_select_attention_grad npu_nsa_select_attention_infer npu_qkv_rms_norm_rope_cache
        npu_qkv_rms_norm_rope_cache_functional npu_recurrent_gated_delta_rule
        npu_recurrent_gated_delta_rule_functional npu_scatter_pa_cache.value npu_scatter_pa_kv_cache
        npu_scatter_pa_kv_cache_functional""",
    UNWRITTEN: """
        npu_apply_adam npu_apply_adam_w npu_attn_softmax_ npu_attn_softmax_backward_
        npu_bert_apply_adam npu_bert_apply_adam.out npu_fused_cross_entropy_loss_with_max_sum
        npu_fused_linear_cross_entropy_loss_with_max_sum_backward npu_fused_matmul
        npu_gather_sparse_index npu_gather_sparse_index_backward npu_masked_fill_range
        npu_masked_softmax_with_rel_pos_bias npu_scatter_list npu_scatter_list_ npu_sign_bits_pack
        npu_sign_bits_unpack npu_top_k_top_p_sample""",
}


def reason(operator: str) -> str:
    """Return why an operator without a formula has none."""
    return next(
        (why for why, names in REFUSED.items() if operator in names.split()), "nobody has written its formula yet"
    )
