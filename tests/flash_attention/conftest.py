"""The kernel that is tested here: FlashAttention."""

from tests.support.local_kernels import kernel_fixture

kernel = kernel_fixture("FlashAttention")
