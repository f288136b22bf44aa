"""Attention for Huawei Ascend NPUs: flash_attn_func, flash_attn_varlen_func, and what transformers calls."""

from .functional import flash_attn_func, flash_attn_varlen_func

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
