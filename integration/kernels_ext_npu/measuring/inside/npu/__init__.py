"""What runs for fused operators of torch_npu: the rows of the table, a file for each kind."""

from kernels_ext_npu.measuring.inside.npu import (  # noqa: F401
    activations,
    attention,
    experts,
    losses,
    norms,
    updates,
)
