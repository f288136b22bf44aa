"""The kernel that is tested here: RoPE."""

from tests.support.local_kernels import kernel_fixture

kernel = kernel_fixture("RoPE")
