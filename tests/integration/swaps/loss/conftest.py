"""The kernel of losses alone."""

import pytest

import kernels_ext_npu


@pytest.fixture(autouse=True)
def _registered() -> None:
    kernels_ext_npu.register(kernels=["CrossEntropy"])
