"""The kernel that is tested here: LinearAttention."""

from tests.support.local_kernels import kernel_fixture

kernel = kernel_fixture("LinearAttention")
