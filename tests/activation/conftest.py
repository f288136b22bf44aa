"""The kernel that is tested here: Activation."""

from tests.support.local_kernels import kernel_fixture

kernel = kernel_fixture("Activation")
