"""The kernel that is tested here: SwiGLU."""

from tests.support.local_kernels import kernel_fixture

kernel = kernel_fixture("SwiGLU")
