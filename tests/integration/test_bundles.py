"""Kernels from a bundle, in fresh processes that reach no network: every way to load them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import zoo

from kernels_ext_npu import bundles

COMMAND = "from kernels_ext_npu.cli import app; app()"
NOBODY = "http://127.0.0.1:9"  # refuses every connection
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": NOBODY}

LOAD = """
import softnpu, torch, kernels
x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
kernel = kernels.get_kernel("kernels-ext-npu/RMSNorm", version=1{options})
found = kernel.rms_norm(x.to("npu"), torch.ones(64, device="npu"), 1e-6).cpu()
torch.testing.assert_close(found, torch.nn.functional.rms_norm(x, (64,), eps=1e-6))
assert softnpu.counters()["npu_rms_norm"] == 1
print(kernel.__file__)
layer = kernels.LayerRepository("kernels-ext-npu/RoPE", layer_name="RotaryPosEmb", version=1{options})
print(layer.load().__name__)
"""
TRUSTED = ", trust_remote_code={}"

SERVE = """
import softnpu, sys, torch, transformers, kernels_ext_npu
kernels_ext_npu.register(source={source!r})
folder, inputs = sys.argv[1], torch.load(sys.argv[2])
model = transformers.AutoModelForCausalLM.from_pretrained(folder, device_map="npu", use_kernels=True)
reference = transformers.AutoModelForCausalLM.from_pretrained(folder)
with torch.no_grad():
    found = model(**{{key: value.to("npu") for key, value in inputs.items()}}).logits.cpu()
    expected = reference(**inputs).logits
assert (found - expected).norm() <= 1e-5 * expected.norm()
from kernels import get_loaded_kernels
print(*sorted(str(kernel.module.__file__) for kernel in get_loaded_kernels()), sep="\\n")
"""


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "kernels.zip"
    bundles.write(path)
    return path


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, archive: Path) -> Path:
    """HF_HOME, with a bundle installed."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERNELS_CACHE", str(folder / "hub"))
        bundles.install(archive)
    return folder


@pytest.fixture
def model(checkpoint: Callable[[str], Path], tmp_path: Path) -> Callable[[str], list[str]]:
    """The arguments of SERVE: a saved model, and its inputs."""
    import torch

    def arguments(name: str) -> list[str]:
        torch.save(dict(zoo.inputs(name, zoo.build(name))), tmp_path / "inputs.pt")
        return [str(checkpoint(name)), str(tmp_path / "inputs.pt")]

    return arguments


def snapshot(home: Path, name: str, commit: str | None = None) -> str:
    folder = home / "hub" / f"kernels--kernels-ext-npu--{name}"
    return str(folder / "snapshots" / (commit or (folder / "refs" / "v1").read_text()))


def test_kernels_load_offline(run_python, home: Path) -> None:
    result = run_python(LOAD.format(options=""), HF_HOME=str(home), **OFFLINE)
    file, layer = result.stdout.splitlines()
    assert file == f"{snapshot(home, 'RMSNorm')}/build/torch-npu/__init__.py"
    assert layer == "RotaryPosEmb"
    assert "Skipping publisher trust check for 'kernels-ext-npu/RMSNorm'" in result.stderr


@pytest.mark.parametrize(
    ("name", "repositories"),
    [("qwen3", ["RMSNorm", "RoPE", "SwiGLU"]), ("qwen3_moe", ["FusedMoE", "RMSNorm", "RoPE"])],
)
def test_a_model_takes_the_hubs_kernels_offline(run_python, home: Path, model, name: str, repositories) -> None:
    output = run_python(SERVE.format(source="hub"), *model(name), HF_HOME=str(home), **OFFLINE).stdout
    assert output.splitlines() == [
        f"{snapshot(home, repository)}/build/torch-npu/__init__.py" for repository in repositories
    ]


def test_a_model_takes_the_bundled_kernels_as_before(run_python, home: Path, model) -> None:
    output = run_python(SERVE.format(source="bundled"), *model("qwen3"), HF_HOME=str(home), **OFFLINE).stdout
    assert output
    assert str(home) not in output


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (TRUSTED.format("['kernels-ext-npu/RMSNorm']"), "ConnectError: [Errno 111] Connection refused"),
        ("", "could not verify publisher trust status"),
    ],
)
def test_without_a_network_kernels_has_to_be_told_so(run_python, home: Path, options: str, error: str) -> None:
    """It asks the Hub which versions there are, whatever the cache holds: README says to set HF_HUB_OFFLINE."""
    environment = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": NOBODY, "HF_HOME": str(home)}
    result = run_python(LOAD.format(options=options), check=False, **environment)
    assert result.returncode == 1
    assert error in result.stderr


def test_an_installed_bundle_is_verified(run_python, home: Path) -> None:
    output = run_python(COMMAND, "verify", str(home / "hub"), HF_HOME=str(home), **OFFLINE).stdout
    assert output.count("intact") >= 20
