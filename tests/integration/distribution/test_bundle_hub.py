"""Bundles of what is published, and a Hub that is not huggingface.co: real clients against a Hub on loopback."""

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kernels_ext_npu import catalogue
from kernels_ext_npu.distribution import bundle_archive, sources
from tests.integration.distribution.test_bundles import LOAD, NOBODY, OFFLINE
from tests.localhub import LocalHub

COMMAND = "from kernels_ext_npu.cli import app; app()"

CHOOSE = """
import sys
import softnpu, kernels_ext_npu
from transformers import KernelConfig, LlamaConfig, LlamaForCausalLM
kernels_ext_npu.register()
sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=1, vocab_size=9)
model = LlamaForCausalLM(LlamaConfig(**sizes)).to("npu")
chosen = "someone/SwiGLU:SwiGLUMLP", {"version": 1, "trust_remote_code": True}
model.set_use_kernels(True, KernelConfig({"SwiGLUMLP": chosen}))
print(sys.modules[model.model.layers[0].mlp.forward.__func__.__module__].__file__)
"""


def publish(
    hub: LocalHub,
    card: str,
    names: Sequence[str] = catalogue.REPOSITORIES,
    variants: str = "torch-npu",
    **changes: bytes,
) -> dict[str, str]:
    """Publish all repositories, or those named, with some variants; return the commits of their versions."""
    others = {"README.md": f"# {card}".encode(), "benchmarks/large.bin": bytes(2**20)} | changes
    return {name: hub.publish(f"kernels-ext-npu/{name}", built(name, variants) | others) for name in names}


def built(name: str, variants: str) -> dict[str, bytes]:
    root = sources.root("bundled") / name
    paths = [path for path in (root / "build").glob(f"{variants}/**/*") if path.is_file() and path.suffix != ".pyc"]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


@pytest.fixture
def bundle(run_forked, localhub: LocalHub, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The command on a machine that reaches the Hub; it writes kernels.zip."""

    def run(**environment: str) -> subprocess.CompletedProcess[str]:
        arguments = ["bundle", "--source", "hub", "--output", str(tmp_path / "kernels.zip")]
        environment = localhub.environment(tmp_path / "connected") | environment
        return run_forked(COMMAND, *arguments, check=False, **environment)

    return run


def test_from_the_hub_to_a_machine_without_a_network(run_forked, localhub: LocalHub, bundle, tmp_path: Path) -> None:
    published = publish(localhub, "first")
    archive, home = tmp_path / "kernels.zip", tmp_path / "cluster"
    offline = {"HF_HOME": str(home), **OFFLINE}
    assert bundle().returncode == 0
    bundled = {each.name: each for each in bundle_archive.unpack(archive)}
    assert {name: each.commit for name, each in bundled.items()} == published
    assert {"README.md", ".gitattributes", "benchmarks/large.bin"} <= bundled["RMSNorm"].files.keys()
    run_forked(COMMAND, "bundle", "--install", str(archive), **offline)
    folder = home / "hub" / "kernels--kernels-ext-npu--RMSNorm"
    file, _ = run_forked(LOAD, **offline).stdout.splitlines()
    assert file == f"{folder}/snapshots/{published['RMSNorm']}/build/torch-npu/__init__.py"

    before, after = published["RMSNorm"], publish(localhub, "second", ["RMSNorm"])["RMSNorm"]
    assert bundle().returncode == 0
    output = run_forked(COMMAND, "bundle", "--install", str(archive), **offline).stdout
    assert f"RMSNorm v1, commit {after}: in place of {before}, whose files stay in the cache\n" in output
    assert f"RoPE v1, commit {published['RoPE']}: was there already\n" in output
    assert (folder / "refs" / "v1").read_text() == after
    assert {path.name for path in (folder / "snapshots").iterdir()} == {before, after}


def test_somebody_may_choose_a_kernel_for_a_class_that_transformers_has_not_marked(
    run_forked, localhub: LocalHub, tmp_path: Path
) -> None:
    localhub.publish("someone/SwiGLU", built("SwiGLU", "torch-npu"))
    mirror = {"HF_ENDPOINT": localhub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    assert "/kernels--someone--SwiGLU/" in run_forked(CHOOSE, **mirror).stdout


def test_what_is_wrong_on_the_hub_is_not_bundled(localhub: LocalHub, bundle, tmp_path: Path) -> None:
    publish(localhub, "card", **{"build/torch-npu/layers.py": b"import os"})
    changed = bundle()
    assert "RMSNorm/build/torch-npu: layers.py: changed, its digest differs" in changed.stderr
    assert "SwiGLU/build/torch-npu: layers.py: changed, its digest differs" in changed.stderr  # all, not the first
    localhub.faults.add("status", status=500, times=99)
    broken = bundle()
    localhub.faults.clear()
    assert "500 Internal Server Error" in broken.stderr
    first = f"kernels-ext-npu/{catalogue.REPOSITORIES[0]}"
    del localhub.repository(first).branches["v1"]
    without_a_branch = bundle()
    assert f"{first} has no version 1" in without_a_branch.stderr
    del localhub.repositories["kernels", first]
    missing, offline, unreachable = bundle(), bundle(HF_HUB_OFFLINE="1"), bundle(HF_ENDPOINT=NOBODY)
    for result in (changed, broken, without_a_branch, missing, offline, unreachable):
        assert (result.returncode, result.stdout) == (1, "")
        assert "Traceback" not in result.stderr
    for result, endpoint in ((missing, localhub.url), (offline, localhub.url), (unreachable, NOBODY)):
        assert f"{first} cannot be downloaded from {endpoint}: " in result.stderr
    assert not (tmp_path / "kernels.zip").exists()
