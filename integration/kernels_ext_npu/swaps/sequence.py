"""All swaps, in the order in which they go into a model."""

from __future__ import annotations

from kernels_ext_npu.swaps import add_norm_fusion, attention, experts, functions, gate_up_layout, layers, shared_heads
from kernels_ext_npu.swaps.linear import lora
from kernels_ext_npu.swaps.loss import lm_head_loss
from kernels_ext_npu.swaps.protocol import Swap

SWAPS = (
    Swap("layers", layers.apply, layers.install, layers.revert, layers.rows),
    Swap("functions", functions.apply, revert=functions.revert, rows=functions.rows),
    Swap("shared heads", shared_heads.apply),
    Swap("attention", attention.apply, attention.install, attention.revert, attention.rows),
    Swap("experts", experts.apply, experts.install, experts.revert),
    Swap("loss", lm_head_loss.apply, rows=lm_head_loss.rows),
    Swap("linear layers", lora.apply, rows=lora.rows),
    Swap("gate and up", gate_up_layout.apply),
    Swap("sums and norms", add_norm_fusion.apply),
)
