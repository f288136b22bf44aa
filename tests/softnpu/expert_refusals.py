"""Calls of operators for experts that the device refuses, each with the rule, for test_operator_refusals.py."""

import torch
import torch_npu
from torch import Tensor

from tests.softnpu.given import FULL, INT, half, index, int8, int32, npu

gmm, expert_tokens = torch_npu.npu_grouped_matmul, torch_npu.npu_moe_compute_expert_tokens
permute, unpermute = torch_npu.npu_moe_token_permute, torch_npu.npu_moe_token_unpermute
permute_grad, unpermute_grad = torch.ops.npu.npu_moe_token_permute_grad, torch.ops.npu.npu_moe_token_unpermute_grad
permute_grad_v2 = torch.ops.npu.npu_moe_token_permute_grad_v2
unpermute_grad_v2 = torch.ops.npu.npu_moe_token_unpermute_grad_v2
softmax_top_k, softmax_top_k_v2 = torch_npu.npu_moe_gating_top_k_softmax, torch_npu.npu_moe_gating_top_k_softmax_v2
top_k, top_k_backward = torch_npu.npu_moe_gating_top_k, torch.ops.npu.npu_moe_gating_top_k_backward


# ---- products of groups ----------------------------------------------------------------------------------------------
def rows(x=None, weight=None, group_list=None, **options) -> list[Tensor]:
    options = {"split_item": 2, "group_type": 0} | options
    x, weight = x or [half(4, 8)], weight or [half(2, 8, 3)]
    return gmm(x, weight, group_list=index(1, 4) if group_list is None else group_list, **options)


def wide(count: int, inner: int, results: int = 1) -> list[Tensor]:
    """So many rows in the second of two groups, which take no memory."""
    return rows([half(1, inner).expand(count, -1)], [half(2, inner, results)], index(0, count))


def parts(x=None, weight=None, **options) -> list[Tensor]:
    x = half(4, 8).t() if x is None else x
    return rows([x], [half(4, 3) if weight is None else weight], **{"group_type": 2} | options)


def on_host(x=None, weight=None, group_list=(1, 4), **options) -> list[Tensor]:
    return gmm(x or [half(4, 8)], weight or [half(8, 3)] * 2, group_list=list(group_list), **options)


def added(**options) -> Tensor:
    return torch_npu.npu_grouped_matmul_add_(npu(16, 3), half(4, 8), half(4, 3), index(1, 4), **options)


GROUPS = [
    (lambda: rows(group_type=None), "Requires manual passing group_type"),
    (lambda: rows(group_type=1), r"must be -1, 0 or 2, but now is \[1\]"),
    (lambda: rows(split_item=0), r"split_item is 0; group_type 0 takes \(2, 3\)"),
    (lambda: rows(group_list_type=2), "group_list_type is 2"),
    (lambda: rows(act_type=1), "act_type is 1; only quantised x"),
    (lambda: rows(scale=[half(2, 3)]), r"take \[\], .*given are \['scale'\]"),
    (lambda: rows(output_dtype=6), "give a result of torch.bfloat16, not torch.float32"),
    (lambda: rows(tuning_config=[1]), "tuning_config is given"),
    (lambda: rows([npu(4, 8)]), r"\(float32, bfloat16\)"),
    (lambda: rows([half(4, 8), npu(4, 8)]), "tensors of one list differ in dtype"),
    (lambda: rows(bias=[half(2, 3)]), "the bias of torch.bfloat16 must be torch.float32"),
    (lambda: rows(bias=[npu(3)]), r"the bias must be one tensor of shape \[2, 3\]"),
    (lambda: rows(group_list=index(1, 4, dtype=INT)), r"must be int64 .*got int32 \[2\]"),
    (lambda: rows(group_list=index(1, 4)[None]), r"1 dimension, got int64 \[1, 2\]"),
    (lambda: rows(group_list=torch.tensor([1, 4])), "at least two devices"),
    (lambda: rows(group_list=index(1, 2, 4)), "group_list has 3 groups and the weights have 2"),
    (lambda: rows(group_list=index(3, 2)), r"decreases: sizes \[3, -1\]"),
    (lambda: rows(group_list=index(-1, 2), group_list_type=1), "negative element"),
    (lambda: rows(group_list=index(1, 5)), "the groups have 5 elements, more than the 4 of x"),
    (lambda: rows(None, [half(1025, 8, 3)], index(*[0] * 1025)), "1025 groups; the device takes 1 to 1024"),
    (lambda: gmm([half(4, 8)], [half(2, 8, 3)], split_item=2, group_type=0), "need a group_list"),
    (lambda: rows(weight=[half(2, 7, 3)]), "differ in the size K"),
    (lambda: rows(weight=[half(8, 3)]), "weight must have 3 dimensions here"),
    (lambda: rows([half(1, 4, 8)]), "x must have 2 dimensions here"),
    (lambda: rows([half(8, 4).t()]), r"x must not be transposed here, got .* strides \[1, 4\]"),
    (lambda: rows(weight=[half(2, 8, 6)[..., :3]]), "contiguous or the transposed view of a contiguous tensor"),
    (lambda: rows(weight=[half(8, 3), half(3, 8).t()]), "all weights are transposed or none"),
    (lambda: rows(weight=[half(8, 3), half(8, 4)]), r"one size N, got \[3, 4\]"),
    (lambda: rows(weight=[half(8, 3)] * 129, group_list=index(*[0] * 129)), "weight has 129 tensors"),
    (lambda: rows([half(4, 8)] * 3, [half(8, 3)] * 2), "3 tensors x and 2 weights"),
    (lambda: rows([half(2, 8)] * 2, [half(8, 3)] * 2), r"group_list says \[1, 3\] rows a group, .* have \[2, 2\]"),
    (lambda: rows([npu(2, 8)] * 2, [npu(8, 3)] * 2), "float32 takes one x"),
    (lambda: rows([half(1, 65536)], [half(1, 65536, 1)], index(1)), "65536 elements .* at most 65535"),
    (lambda: wide(2**20, 4096), r"1048576 rows of 4096 elements; the device takes fewer than 2\*\*32"),
    (lambda: wide(2**22, 16, results=1024), "4194304 rows of 1024 elements"),
    (lambda: rows([int8(4, 8)], [int8(2, 8, 3)]), r"with \['scale'\] required"),
    (lambda: rows([int8(4, 8)], [int8(2, 8, 3)], scale=[half(2, 3)]), r"\(scale, result\) must be"),
    (lambda: parts(bias=[npu(3)]), "group_type 2 takes no bias"),
    (lambda: parts(half(8, 4)), r"takes x as the transposed view .* strides \[4, 1\]"),
    (lambda: parts(weight=half(3, 4).t()), "weight must not be transposed"),
    (lambda: rows([half(4, 8).t()] * 2, [half(4, 3)] * 2, group_type=2), "takes one of each"),
    (lambda: rows(group_type=-1, split_item=0), "group_type -1 takes no group_list"),
    (lambda: gmm([half(4, 8)], [half(8, 3)], group_type=-1, split_item=2), "split_item is 2; group_type -1"),
    (lambda: gmm([half(8)], [half(8, 3)], group_type=-1), "x must have 2 to 6 dimensions"),
    (lambda: gmm([], [half(8, 3)], group_type=-1), "x has 0 tensors"),
    (lambda: on_host(group_type=0), "group_type is given"),
    (lambda: on_host(group_list_type=1), "group_list_type is given"),
    (lambda: on_host(split_item=4), "split_item is 4"),
    (lambda: on_host(group_list=[4]), "group_list has one end"),
    (lambda: on_host(group_list=[1, 3]), "the last end must be the number of rows"),
    (lambda: on_host(group_list=[1, 2, 4]), "1 tensors x, 2 weights and 3 ends"),
    (lambda: on_host([half(1, 8), half(3, 8)]), "takes no group_list"),
    (lambda: on_host([half(1, 8), half(3, 8)], [half(3, 8).t()] * 2, []), "takes no transposed weight"),
    (lambda: on_host([half(2, 8)] * 2, split_item=2), "they must be the same groups"),
    (lambda: added(transpose_x=False), "npu_grouped_matmul_add_: takes transpose_x=True"),
]


# ---- rows in the order of their experts ------------------------------------------------------------------------------
def slots(count: int) -> Tensor:
    return torch.arange(count, dtype=INT, device="npu")


def init(x=None, expert_idx=None, **options):
    counted = {"expert_num": 5, "expert_tokens_num_type": 1, "expert_tokens_num_flag": True}
    x, expert_idx = npu(2, 4) if x is None else x, int32(2, 2) if expert_idx is None else expert_idx
    return torch_npu.npu_moe_init_routing_v2(x, expert_idx, **counted | options)


def final(index=None, skip1=None, bias=None, scales=None, **options):
    index = slots(4) if index is None else index
    return torch_npu.npu_moe_finalize_routing(npu(4, 8), skip1, None, bias, scales, index, None, **options)


def permuted(**options):
    routing_map = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1], [1, 1, 0, 0], [0, 0, 1, 1]]).bool().npu()
    given = {"tokens": npu(5, 8), "routing_map": routing_map, "num_out_tokens": 10} | options
    return torch_npu.npu_moe_token_permute_with_routing_map(**given)


ROUTING = [
    (lambda: permute(npu(2, 3, 4), int32(2)), r"token_permute: tokens must have 2 dimensions, got .*\[2, 3, 4\]"),
    (lambda: permute(npu(2, 4), int32(2, 1, 1)), "token_permute: indices must have 1 or 2 dimensions"),
    (lambda: permute(npu(2, 4), int32(3, 2)), "differ in the number of rows"),
    (lambda: permute(npu(2, 4), npu(2, 2)), r"\(float32, float32\)"),
    (lambda: permute(npu(2, 4), -int32(2)), "an index is negative or not below 16777215"),
    (lambda: permute(npu(2, 4), int32(2, 513)), "513 slots for a token; the device takes 0 to 512"),
    (lambda: permute(npu(2, 4), int32(2, 2), -5), "num_out_tokens is -5; there are 4 rows"),
    (lambda: permute(npu(2, 4), int32(2), None, True), "padded_mode is True"),
    (lambda: permute_grad(npu(2, 4), half(4, 4), int32(2, 2), slots(4)), "tokens are .*float32"),
    (lambda: permute_grad_v2(npu(4, 4), slots(4).long(), 2, FULL, 2), r"\(float32, int64\)"),
    (lambda: permute_grad_v2(npu(4, 4), slots(4), 3, FULL, 2), r"shape \[T·K\], got int32 \[4\] for 3"),
    (lambda: permute_grad_v2(npu(4, 4), slots(0), 0, FULL, 0), "0 slots for a token"),
    (lambda: unpermute(npu(4, 2, 2), slots(4)), "token_unpermute: permuted_tokens must have 2 dimensions"),
    (lambda: unpermute(npu(4, 4), slots(4) - 1), "sorted_indices has a negative element"),
    (lambda: unpermute(npu(4, 4), slots(4), npu(4)), "probs must have 2 dimensions"),
    (lambda: unpermute(npu(4, 4), slots(4), npu(3, 2)), r"\[T·K\], got int32 \[4\] for 3 tokens and 2 slots"),
    (lambda: unpermute(npu(4, 4), slots(513), npu(1, 513)), "513 slots for a token; the device takes 1 to 512"),
    (lambda: unpermute_grad(npu(4, 4), half(2, 4), slots(4), npu(2, 2)), "permuted_tokens are"),
    (lambda: unpermute_grad(npu(4, 4), npu(3, 4), slots(4)), "does not have 4 rows"),
    (lambda: unpermute_grad(npu(4, 4), npu(2, 4), slots(4) // 2, npu(2, 2)), "names a row twice"),
    (lambda: unpermute_grad(npu(0, 4), npu(4, 4), slots(4)), "empty: .* 0 permuted rows"),
    (lambda: unpermute_grad_v2(npu(2, 4), slots(4), 4, FULL, npu(2, 2)), "needs permuted_tokens"),
    (
        lambda: unpermute_grad_v2(npu(2, 4), slots(4), 4, FULL, npu(2, 2), permuted_tokens=npu(3, 4)),
        r"is float32 \[3, 4\], expected",
    ),
    (lambda: permuted(num_out_tokens=5), "every token 1 experts"),
    (lambda: permuted(num_out_tokens=24, drop_and_pad=True), "6 rows of 5 an expert"),
    (lambda: torch_npu.npu_moe_init_routing(npu(5, 8), int32(5, 2), int32(5, 2), 3), "once"),
    (lambda: torch_npu.npu_moe_re_routing(half(5, 8), int32(2, 3)), "counts 6 tokens, there are 5"),
    (lambda: init(quant_mode=1, scale=npu(1, 7)), r"scale must be float32 \[1, 4\] or \[5, 4\]"),
    (lambda: init(drop_pad_mode=1, expert_capacity=3), "expert_capacity must be above 0"),
    (lambda: init(drop_pad_mode=1, expert_capacity=1, row_idx_type=1), "takes all experts"),
    (lambda: init(expert_idx=int32(3, 2)), "the same number of rows"),
    (lambda: init(active_num=-2), "active_num should be greater than or equal to -1, got -2"),
    (lambda: init(expert_tokens_num_type=0), "expert_tokens_num_type 1 and 2"),
    (lambda: init(expert_num=-1), "expert_num is -1; the device takes 1 to 10240"),
    (lambda: init(active_expert_range=[3, 3]), r"\[3, 3\) must be some of 5"),
    (lambda: init(scale=npu(3)), r"scale must be float32 \[2\]"),
    (lambda: init(expert_idx=int32(2, 2) * 5), r"outside of \[0, 5\)"),
    (lambda: final(drop_pad_mode=4), "drop_pad_mode is 4"),
    (lambda: final(k=2), "no form of the operator with k"),
    (lambda: final(skip1=npu(2, 8)), r"skip1 must be torch.float32 \[4, 8\]"),
    (lambda: final(scales=npu(3, 2)), r"must be \[6\], got int32 \[4\]"),
    (lambda: final(bias=npu(3, 8)), "bias needs export_for_source_row"),
    (lambda: final(-int32(4)), r"outside of \[0, 4\)"),
]


# ---- the choice of experts -------------------------------------------------------------------------------------------
GATING = [
    *[
        (lambda call=call, x=x, options=options: call(npu(*x), **options), f"npu_moe_gating_top_k_softmax.*{rule}")
        for call in (softmax_top_k, softmax_top_k_v2)
        for x, options, rule in (
            ((4,), {}, "x must have 2 or 3 dimensions"),
            ((4, 8), {"k": 9}, "k is 9; the device takes 0 to 8"),
            ((4, 8), {"k": -1}, "k is -1"),
            ((1, 2000), {"k": 1025}, "k is 1025; the device takes 0 to 1024"),
            ((4, 8), {"finished": npu(5).bool()}, r"finished must be bool \[4\], got bool \[5\]"),
            ((2, 4, 8), {"finished": npu(8).bool()}, r"finished must be bool \[2, 4\]"),
        )
    ],
    (lambda: softmax_top_k_v2(npu(4, 8), renorm=2), "renorm is 2"),
    (lambda: top_k(npu(2, 4, 8), 1), "x must have 2 dimensions"),
    (lambda: top_k(npu(4, 2049), 1), "2049 experts; the device takes at most 2048"),
    (lambda: top_k(npu(4, 8), 0), "k is 0; there are 1 groups of 8"),
    (lambda: top_k(npu(4, 8), 5, k_group=1, group_count=2), "k is 5; there are 1 groups of 4"),
    (lambda: top_k(npu(4, 8), 1, group_count=3), "group_count is 3, which does not divide 8"),
    (lambda: top_k(npu(4, 8), 1, k_group=3, group_count=2), "k_group is 3 of 2"),
    (lambda: top_k(npu(4, 8), 1, group_select_mode=2), "group_select_mode is 2"),
    (lambda: top_k(npu(4, 8), 1, group_count=8, group_select_mode=1), "groups of 1 expert cannot be compared"),
    (lambda: top_k(npu(1, 256), 1, group_count=128), "128 groups of 2 experts fill 4096 places"),
    (lambda: top_k(npu(4, 8), 1, bias=npu(8).half()), "the bias must be torch.float32"),
    (lambda: top_k(npu(4, 8), 1, bias=npu(7)), r"the bias must be torch.float32 \[8\]"),
    (lambda: top_k(npu(4, 8), 1, renorm=1), "renorm is 1"),
    (lambda: top_k(npu(4, 8), 1, norm_type=2), "norm_type is 2"),
    (lambda: top_k(npu(4, 8), 1, input_ids=int32(4), tid2eid=int32(9, 1)), "no form of the operator with input_ids"),
    (lambda: top_k_backward(npu(4, 8), npu(4, 2), int32(4, 3), norm_type=1), r"must be \[T, E\]"),
    (lambda: top_k_backward(npu(4, 8).half(), npu(4, 2), int32(4, 2), norm_type=1), "float16"),
    (lambda: expert_tokens(int32(4, 1), 2), "must have 1 dimension"),
    (lambda: expert_tokens(int32(4), 0), "num_expert is 0; the device takes 1 to 2048"),
    (lambda: expert_tokens(index(2, 1, dtype=INT), 3), "the indices must be sorted"),
]
EXPERTS = [*GROUPS, *ROUTING, *GATING]
