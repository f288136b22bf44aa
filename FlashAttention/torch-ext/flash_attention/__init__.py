"""Attention for Huawei Ascend NPUs: flash-attn's functions, and transformers' attention and mask interfaces."""

from . import attention_spec as attention_spec  # which the integration asks, as it does ops
from . import ops as ops
from .attention_interface import attention_forward
from .functional import flash_attn_func, flash_attn_varlen_func
from .masks.mask_interface import attention_mask
from .ops.fusion_attention_autograd import register_double_backward
from .ops.limits import reads_chosen_in_place
from .sparse.indexer_loss import indexer_loss
from .sparse.lightning_indexer import top_k_keys
from .sparse.sparse_attention import attend_chosen
from .varlen.cu_seqlens import read_together

__all__ = [
    "attend_chosen",
    "attention_forward",
    "attention_mask",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "indexer_loss",
    "read_together",
    "reads_chosen_in_place",
    "top_k_keys",
]

register_double_backward()
