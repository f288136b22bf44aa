"""All finders, in the order in which what they decide goes into a model. A new kind of kernel is one entry."""

from __future__ import annotations

from kernels_ext_npu.swaps import (
    add_norm_fusion,
    attention,
    experts,
    functions,
    gate_up_layout,
    layers,
    recognised,
    shared_heads,
)
from kernels_ext_npu.swaps.decision import Finder
from kernels_ext_npu.swaps.linear import compressed_linear, lora
from kernels_ext_npu.swaps.loss import lm_head_loss

FINDERS: tuple[Finder, ...] = (
    layers.FINDER,
    recognised.FINDER,
    functions.FINDER,
    shared_heads.FINDER,
    attention.FINDER,
    experts.FINDER,
    lm_head_loss.FINDER,
    compressed_linear.FINDER,
    lora.FINDER,
    gate_up_layout.FINDER,
    add_norm_fusion.FINDER,
)
