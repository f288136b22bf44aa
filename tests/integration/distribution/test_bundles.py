"""Kernels from a bundle, in fresh processes that reach no network: every way to load them."""

from pathlib import Path

import pytest
import torch

from kernels_ext_npu.distribution import bundles, sources
from tests.support import zoo

NOBODY = "http://127.0.0.1:9"  # refuses every connection
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": NOBODY}

LOAD = """
import softnpu, torch, kernels
x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
kernel = kernels.get_kernel("kernels-ext-npu/RMSNorm", version=1)
found = kernel.rms_norm(x.to("npu"), torch.ones(64, device="npu"), 1e-6).cpu()
torch.testing.assert_close(found, torch.nn.functional.rms_norm(x, (64,), eps=1e-6))
assert softnpu.counters()["npu_rms_norm"] == 1
print(kernel.__file__)
layer = kernels.LayerRepository("kernels-ext-npu/RoPE", layer_name="RotaryPosEmb", version=1)
print(layer.load().__name__)
"""

SERVE = """
import softnpu, sys, torch, transformers, kernels, kernels_ext_npu
loaded = set()
for source, folder in zip(sys.argv[1::2], sys.argv[2::2]):
    kernels_ext_npu.register(source=source)
    inputs = torch.load(folder + "/inputs.pt")
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, device_map="npu", use_kernels=True)
    with torch.no_grad():
        found = model(**{key: value.to("npu") for key, value in inputs.items()}).logits.cpu()
        expected = reference(**inputs).logits
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    files = {kernel.module.__file__ for kernel in kernels.get_loaded_kernels()}
    print(*sorted(files - loaded))
    loaded = files
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, archive: Path) -> Path:
    """HF_HOME, with a bundle installed."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERNELS_CACHE", str(folder / "hub"))
        patch.setattr("os.fsync", lambda file: None)
        bundles.install(archive)
    return folder


def snapshot(home: Path, name: str) -> str:
    folder = home / "hub" / f"kernels--kernels-ext-npu--{name}"
    return str(folder / "snapshots" / (folder / "refs" / "v1").read_text())


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_HUB_CACHE", "KERNELS_CACHE"])
def test_kernels_load_offline(run_forked, home: Path, variable: str) -> None:
    folder = home if variable == "HF_HOME" else home / "hub"
    file, layer = run_forked(LOAD, **{variable: str(folder)}, **OFFLINE).stdout.splitlines()
    assert file == f"{snapshot(home, 'RMSNorm')}/build/torch-npu/__init__.py"
    assert layer == "RotaryPosEmb"


def test_models_take_kernels_of_either_source_offline(run_forked, home: Path, checkpoint) -> None:
    dense, mixture = checkpoint("qwen3"), checkpoint("qwen3_moe")
    for name, folder in (("qwen3", dense), ("qwen3_moe", mixture)):
        torch.save(dict(zoo.inputs(name, zoo.build(name))), folder / "inputs.pt")
    arguments = ["hub", str(dense), "hub", str(mixture), "bundled", str(dense)]
    lines = run_forked(SERVE, *arguments, HF_HOME=str(home), **OFFLINE).stdout.splitlines()
    dense = "CrossEntropy", "FlashAttention", "RMSNorm", "RoPE", "SwiGLU"
    for line, expected in zip(
        lines,
        [
            [snapshot(home, name) for name in dense],
            [snapshot(home, "FusedMoE")],
            [str(sources.root("bundled") / name) for name in dense],
        ],
        strict=True,
    ):
        assert line.split() == [f"{folder}/build/torch-npu/__init__.py" for folder in expected]
