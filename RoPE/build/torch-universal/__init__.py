"""Rotary position embedding for Huawei Ascend NPUs: one fused operator a tensor, for inference and training."""

from . import layers
from .functional import apply_multimodal_rotary_pos_emb, apply_rotary_pos_emb, rotary_mul

__all__ = ["apply_multimodal_rotary_pos_emb", "apply_rotary_pos_emb", "layers", "rotary_mul"]
