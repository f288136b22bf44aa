"""The kernel that is tested here: CrossEntropy."""

from tests.support.local_kernels import kernel_fixture

kernel = kernel_fixture("CrossEntropy")
