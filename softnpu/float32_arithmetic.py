"""Compute in float32 where the device does and the CPU, given 16-bit tensors, rounds every step or every addition.

Sources: the op_api of CANN's ops-nn casts before these kernels (``l0op::Cast`` to DT_FLOAT in ``aclnn_index_put_impl``,
``aclnn_embedding_dense_backward``, ``aclnn_nll_loss``, ``aclnn_glu_backward``, ``aclnn_avgpool2d_backward``,
``aclnn_max_pool2d_with_indices_backward``), or the kernels keep their sums in float32. For the others it is inferred.
``put_`` is not here: ``aclnn_put`` adds in the dtype that it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NARROW = (torch.float16, torch.bfloat16)

# the dtypes of results where they are not all that of the first 16-bit argument: None for that one
_STATISTICS = None, torch.float32, torch.float32
RESULTS: dict[str, tuple[torch.dtype | None, ...]] = {
    "native_layer_norm": _STATISTICS,  # op-plugin, LayerNormKernelNpuOpApi.cpp
    "native_layer_norm_backward": _STATISTICS,  # LayerNormBackwardKernelNpuOpApi.cpp
    "native_batch_norm": _STATISTICS,  # op_plugin_functions.yaml
    "native_batch_norm_backward": _STATISTICS,  # BatchNormBackwardKernelNpuOpApi.cpp
}

IN_FLOAT32 = {
    *RESULTS, "native_group_norm", "native_group_norm_backward", "renorm", "npu_renorm_backward",
    # sums of what meets at one index
    "_index_put_impl_", "index_put", "index_put_", "index_add", "index_add_", "scatter_add", "scatter_add_",
    "scatter_reduce", "scatter_reduce_", "embedding_dense_backward", "repeat_interleave_backward_int",
    "repeat_interleave_backward_tensor", "unfold_backward", "col2im", "prod", "addbmm", "addr", "logsumexp",
    # convolutions and pools
    "convolution", "convolution_backward", "conv_tbc", "avg_pool2d_backward", "avg_pool3d", "avg_pool3d_backward",
    "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d", "_adaptive_avg_pool3d_backward",
    "adaptive_max_pool2d_backward", "max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward",
    "reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward",
    "replication_pad1d_backward", "replication_pad2d_backward", "replication_pad3d_backward", "grid_sampler_2d",
    "grid_sampler_2d_backward", "grid_sampler_3d", "grid_sampler_3d_backward", "upsample_bicubic2d",
    "upsample_bicubic2d_backward", "affine_grid_generator", "upsample_linear1d", "upsample_linear1d_backward",
    "upsample_trilinear3d", "upsample_trilinear3d_backward", "_upsample_bicubic2d_aa",
    "_upsample_bicubic2d_aa_backward", "_upsample_bilinear2d_aa", "_upsample_bilinear2d_aa_backward",
    "slow_conv_transpose2d",
    # what the CPU has in float32 only
    "cdist", "_cdist_forward", "_cdist_backward", "_pdist_forward", "_add_relu", "_add_relu_",
    # losses
    "binary_cross_entropy_backward", "binary_cross_entropy_with_logits",
    "npu_binary_cross_entropy_with_logits_backward", "kl_div_backward", "kl_div_target_backward", "l1_loss_backward",
    "mse_loss_backward", "soft_margin_loss_backward", "nll_loss_forward", "nll_loss2d_forward",
    "multi_margin_loss", "multi_margin_loss_backward", "multilabel_margin_loss_forward",
    "multilabel_margin_loss_backward",
    # gates
    "glu_backward", "logit", "logit_backward", "_thnn_fused_lstm_cell", "_thnn_fused_lstm_cell_backward_impl",
}  # fmt: skip


def in_float32(op: torch._ops.OpOverload, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``run`` in a form that computes in float32 and rounds each result once.

    Arguments that are written to get their values back, results have the dtypes that op-plugin allocates.
    """
    dtypes = RESULTS.get(op._schema.name.partition("::")[2], ())
    arguments = op._schema.arguments
    written = {i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write}
    names = {arguments[i].name for i in written}

    def call(*args: Any, **kwargs: Any) -> Any:
        narrow = next((t.dtype for t in [*args, *kwargs.values()] if _is_narrow(t)), None)
        if narrow is None:
            return run(*args, **kwargs)
        wide_args = [_widened(value) for value in args]
        wide_kwargs = {key: _widened(value) for key, value in kwargs.items()}
        result = run(*wide_args, **wide_kwargs)
        targets = [(wide_args[i], args[i]) for i in written if i < len(args)]
        targets += [(wide_kwargs[key], kwargs[key]) for key in names & kwargs.keys()]
        for wide, target in targets:
            if wide is not target and wide is not None:
                target.resize_(wide.shape).copy_(wide)
        own = {id(wide): target for wide, target in targets}
        several = isinstance(result, tuple)
        results = [
            own[id(r)] if id(r) in own else _narrowed(r, dtypes[i] if i < len(dtypes) else None, narrow)
            for i, r in enumerate(result if several else (result,))
        ]
        return tuple(results) if several else results[0]

    return call


def _is_narrow(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in NARROW


def _widened(value: Any) -> Any:
    return value.float() if _is_narrow(value) else value


def _narrowed(value: Any, dtype: torch.dtype | None, narrow: torch.dtype) -> Any:
    if isinstance(value, Tensor) and value.dtype == torch.float32:
        return value.to(dtype or narrow)
    return value
