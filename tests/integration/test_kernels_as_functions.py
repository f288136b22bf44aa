"""`kernels_ext_npu.load`: the package of a kernel, from this package, without a network."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch

import kernels_ext_npu
from kernels_ext_npu.catalogue import REPOSITORIES

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_A_NETWORK = """
import socket
def refuse(*arguments, **options):
    raise AssertionError(f"the network was asked for {arguments}")
socket.socket.connect = socket.getaddrinfo = refuse

import softnpu, torch, kernels_ext_npu
kernel = kernels_ext_npu.load("RMSNorm")
x = torch.randn(3, 64)
found = kernel.rms_norm(x.npu(), torch.ones(64, device="npu"), 1e-6).cpu()
torch.testing.assert_close(found, torch.nn.functional.rms_norm(x, (64,), eps=1e-6))
assert softnpu.counters()["npu_rms_norm"] == 1
print(kernel.__file__)
"""


def test_a_kernel_computes_without_a_network(run_forked) -> None:
    file = run_forked(WITHOUT_A_NETWORK, HF_HUB_OFFLINE="0").stdout.strip()
    assert file == str(ROOT / "RMSNorm" / "build" / "torch-npu" / "__init__.py")


@pytest.mark.parametrize("name", REPOSITORIES)
def test_every_kernel_is_there_by_its_name_and_by_its_id(name: str) -> None:
    kernel = kernels_ext_npu.load(name)
    assert all(hasattr(kernel, exported) for exported in kernel.__all__)
    assert kernels_ext_npu.load(f"kernels-ext-npu/{name}").__file__ == kernel.__file__


def test_a_clone_is_a_source(tmp_path: Path) -> None:
    (tmp_path / "SwiGLU").symlink_to(ROOT / "SwiGLU")
    kernel = kernels_ext_npu.load("swiglu", source=tmp_path)
    x = torch.randn(3, 64)
    expected = torch.nn.functional.silu(x[:, :32]) * x[:, 32:]
    torch.testing.assert_close(kernel.swiglu(x.npu()).cpu(), expected)


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="there is no kernel 'RMSNrom': did you mean RMSNorm"):
        kernels_ext_npu.load("RMSNrom")
    with pytest.raises(FileNotFoundError, match='did you mean "bundled"'):
        kernels_ext_npu.load("RMSNorm", source="bundle")
    with pytest.raises(ValueError, match="there is no kernel None: there are Activation, CrossEntropy"):
        kernels_ext_npu.load(None)


def test_what_is_no_source_is_told_what_is_one() -> None:
    for use in (partial(kernels_ext_npu.load, "RMSNorm"), kernels_ext_npu.register):
        for source in (None, 1, ["bundled"]):
            said = f'source={source!r} is neither text nor a path. A source is "bundled", "hub", or the path of a clone'
            with pytest.raises(TypeError, match=re.escape(said)):
                use(source=source)
