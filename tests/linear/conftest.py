"""The kernel that is tested here: Linear."""

from tests.support.local_kernels import kernel_fixture

kernel = kernel_fixture("Linear")
