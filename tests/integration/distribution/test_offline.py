"""Kernels without internet, carried over as docs/offline.md says, in fresh processes that reach no network."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels_ext_npu import catalogue
from kernels_ext_npu.distribution import sources
from tests.localhub import LocalHub
from tests.support import zoo
from tests.support.published_kernels import publish

PAGES = [Path(__file__).resolve().parents[3] / "docs" / name for name in ("offline.md", "offline.zh.md")]
CONNECTED, CLUSTER = re.findall(r"```sh\n(.*?)```", PAGES[0].read_text(), re.DOTALL)
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


def shell(commands: str, folder: Path, endpoint: str) -> str:
    """Run commands of the page in a folder, with this Python's programs."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "KERNELS_"))}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HF_ENDPOINT": endpoint}
    command = ["bash", "-euc", commands]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HF_HOME, as the commands of the page leave it where there is no internet."""
    connected, cluster = tmp_path_factory.mktemp("connected"), tmp_path_factory.mktemp("cluster")
    with LocalHub() as hub:
        publish(hub, "card")
        shell(CONNECTED, connected, hub.url)
    (connected / "carried.tar").rename(cluster / "carried.tar")
    assert "torch-npu" in shell(CLUSTER, cluster, NOBODY)  # in the table of what is intact
    return cluster / "carried"


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


def test_both_pages_give_the_same_commands_for_all_kernels() -> None:
    commands = [re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL) for page in PAGES]
    assert commands[0] == commands[1]
    assert f"for kernel in {' '.join(catalogue.REPOSITORIES)}; do" in CONNECTED
