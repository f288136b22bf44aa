"""What runs for experts: choosing them, sorting tokens by them, products by groups, and sums over them."""

from __future__ import annotations

from collections.abc import Iterable

from kernels_ext_npu.measuring.inside.table import Call, Kernel, if_transposed, nbytes, one_kernel, row

_SORTED = 4 * 2 * 3  # bytes of the workspace for an index that is sorted: pairs of float32 with what they come from

one_kernel(
    "npu_grouped_matmul",
    kernel="GroupedMatmul",
    source="op-plugin GroupedMatmulKernelNpuOpApi.cpp; ops-transformer gmm/grouped_matmul/…/aclnn_grouped_matmul.cpp, "
    "`SetTransposedTensorListContiguous` 8.5.0:1775-1824 9.1.0:2567-2598: a transposed view is told as such, and not "
    "copied",
    reads_in_place=if_transposed,
)
one_kernel(
    "npu_grouped_matmul_add_",
    kernel="GroupedMatmulAdd",
    source="op-plugin GroupedMatmulAddNpuOpApi.cpp; ops-transformer gmm/grouped_matmul_add/…/"
    "aclnn_grouped_matmul_add.cpp 8.5.0:101-163",
)
one_kernel(
    "npu_moe_gating_top_k_softmax",
    kernel="MoeGatingTopKSoftmax",
    source="op-plugin MoeGatingTopKSoftmaxKernelNpuOpApi.cpp; ops-transformer moe/moe_gating_top_k_softmax/op_host/"
    "moe_gating_top_k_softmax_def.cpp (`AutoContiguous`)",
)
one_kernel(
    "npu_moe_compute_expert_tokens",
    kernel="MoeComputeExpertTokens",
    source="op-plugin op_plugin_functions.yaml; ops-transformer moe/moe_compute_expert_tokens/op_host/"
    "moe_compute_expert_tokens_def.cpp",
)
one_kernel(
    "npu_moe_finalize_routing",
    kernel="MoeFinalizeRoutingV2",
    source="op-plugin MoeFinalizeRoutingV2KernelNpuOpApi.cpp; ops-transformer moe/moe_finalize_routing_v2/op_host/"
    "moe_finalize_routing_v2_def.cpp",
)


@row(
    "npu_moe_token_unpermute",
    "_npu_moe_token_unpermute",
    source="op-plugin op_plugin_functions.yaml; ops-transformer moe/moe_token_unpermute/op_host/op_api/"
    "aclnn_moe_token_unpermute.cpp 9.1.0:90-117",
)
def _unpermute(call: Call) -> Iterable[Kernel]:
    """MoeTokenUnpermute. The second result, of the name with an underscore, is what it was given."""
    yield call.main("MoeTokenUnpermute", call.moved - sum(map(nbytes, call.results[1:])))


@row(
    "npu_moe_gating_top_k",
    source="op-plugin MoeGatingTopKKernelNpuOpApi.cpp; ops-transformer moe/moe_gating_top_k/op_kernel/"
    "moe_gating_top_k_without_group.h 9.1.0:331 and moe_gating_top_k_generalized.h 9.1.0:656",
)
def _gating(call: Call) -> Iterable[Kernel]:
    """MoeGatingTopK, which writes all scores where ``out_flag`` asks for them."""
    yield call.main("MoeGatingTopK", call.moved - (0 if call.given["out_flag"] else nbytes(call.results[2])))


@row(
    "npu_moe_token_permute",
    source="op-plugin op_plugin_functions.yaml; ops-transformer moe/moe_token_permute/op_host/op_api/"
    "aclnn_moe_token_permute.cpp 8.5.0:60-80 9.1.0:88-90, and op_host/moe_token_permute_tiling.cpp, `GetWorkspaceSize` "
    "9.1.0:440-446",
)
def _permute(call: Call) -> Iterable[Kernel]:
    """MoeTokenPermute: it sorts indices in its workspace, written and read at least once, and copies rows."""
    yield from _sorting(call, "MoeTokenPermute", call.given["indices"].numel())


@row(
    "npu_moe_init_routing_v2",
    source="op-plugin MoeInitRoutingV2KernelNpuOpApi.cpp; ops-transformer moe/moe_init_routing_v3/op_host/"
    "moe_init_routing_v3_tiling.cpp, `GetWorkspaceSize` 9.1.0:1003-1030",
)
def _init_routing(call: Call) -> Iterable[Kernel]:
    """MoeInitRoutingV3: it sorts indices in its workspace, written and read at least once, and copies rows."""
    yield from _sorting(call, "MoeInitRoutingV3", call.given["expert_idx"].numel())


def _sorting(call: Call, kernel: str, indices: int) -> Iterable[Kernel]:
    yield call.main(kernel, call.moved + 2 * _SORTED * indices, workspace=_SORTED * indices)


@row(
    "npu_moe_token_permute_grad",
    "npu_moe_token_permute_grad_v2",
    source="op-plugin op_plugin_functions.yaml, `npu_moe_token_permute_grad`; ops-transformer "
    "moe/moe_token_permute_grad/op_host/op_api/aclnn_moe_token_permute_grad.cpp 9.1.0:80-94",
)
def _permute_grad(call: Call) -> Iterable[Kernel]:
    """MoeTokenPermuteGrad, which reads the gradient and where its rows came from, and of the tokens nothing."""
    read = sum(nbytes(call.given[name]) for name in ("grad_permuted_tokens", "sorted_indices"))
    yield call.main("MoeTokenPermuteGrad", read + nbytes(call.result))


@row(
    "npu_moe_token_unpermute_grad",
    "npu_moe_token_unpermute_grad_v2",
    source="op-plugin op_plugin_functions.yaml; ops-transformer moe/moe_token_unpermute_grad/op_kernel/"
    "moe_token_unpermute_grad_prob_none.h and moe_token_unpermute_grad_prob_not_none.h",
)
def _unpermute_grad(call: Call) -> Iterable[Kernel]:
    """MoeTokenUnpermuteGrad; without probabilities it reads no permuted rows, and writes no gradient of them."""
    unread = 0
    if call.given["probs"] is None:
        permuted = call.given["permuted_tokens"]
        unread = (0 if permuted is None else nbytes(permuted)) + sum(map(nbytes, call.results[1:]))
    yield call.main("MoeTokenUnpermuteGrad", call.moved - unread)
