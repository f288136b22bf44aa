"""The kernel that is tested here: FusedMoE."""

from tests.support.local_kernels import kernel_fixture

kernel = kernel_fixture("FusedMoE")
