"""What runs for operators of torch: the rows of the table, a file for each kind."""

from kernels_ext_npu.measuring.inside.aten import (  # noqa: F401
    activations,
    convolutions,
    copies,
    creation,
    foreach,
    indexing,
    pointwise,
    products,
    reductions,
)
