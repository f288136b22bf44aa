"""Attention for Huawei Ascend NPUs: flash-attn's functions, and what the attention of transformers is made of."""

from .choosing import top_k_keys
from .chosen_keys import attend_chosen
from .forward import attention_forward
from .functional import flash_attn_func, flash_attn_varlen_func
from .lengths import read_together
from .limits import reads_chosen_in_place
from .masks import attention_mask
from .second_derivatives import register_derivative_of_attention

__all__ = [
    "attend_chosen",
    "attention_forward",
    "attention_mask",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "read_together",
    "reads_chosen_in_place",
    "top_k_keys",
]

register_derivative_of_attention()
