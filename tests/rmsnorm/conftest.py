"""The kernel that is tested here: RMSNorm."""

from tests.support.local_kernels import kernel_fixture

kernel = kernel_fixture("RMSNorm")
