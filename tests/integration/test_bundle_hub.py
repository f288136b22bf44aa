"""Bundles of what is published, and a Hub that is not huggingface.co: real clients against a Hub on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels_ext_npu import bundle_archive, sources
from tests.localhub import LocalHub

COMMAND = "from kernels_ext_npu.cli import app; app()"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}

PUBLISH = """
import sys
from pathlib import Path
from huggingface_hub import CommitOperationAdd, HfApi
api = HfApi()
for name in {names!r}:
    repository = "kernels-ext-npu/" + name
    api.create_repo(repository, repo_type="kernel", exist_ok=True)
    api.create_branch(repository, repo_type="kernel", branch="v1", exist_ok=True)
    root = Path({root!r}) / name
    files = {{str(path.relative_to(root)): path.read_bytes() for path in (root / "build").rglob("*") if path.is_file()}}
    files = {{path: content for path, content in files.items() if "__pycache__" not in path}}
    files |= {{"README.md": b"# {card}", "benchmarks/large.bin": bytes(2**20)}}
    files |= {changes!r}
    operations = [CommitOperationAdd(path, content) for path, content in files.items()]
    made = api.create_commit(repository, operations, commit_message="x", repo_type="kernel", revision="v1")
    print(made.oid)
"""

LOAD = """
import softnpu, torch, kernels
kernel = kernels.get_kernel("kernels-ext-npu/RMSNorm", version=1, trust_remote_code=["kernels-ext-npu/RMSNorm"])
kernel.rms_norm(torch.ones(4, 64, device="npu"), torch.ones(64, device="npu"), 1e-6)
assert softnpu.counters()["npu_rms_norm"] == 1
print(kernel.__file__)
"""

REGISTER = """
import softnpu, kernels_ext_npu
from transformers import LlamaConfig, LlamaForCausalLM
kernels_ext_npu.register(source="hub")
sizes = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=9)
model = LlamaForCausalLM(LlamaConfig(**sizes)).to("npu")
model.set_use_kernels(True)
print(kernels_ext_npu.report(model))
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalHub]:
    with LocalHub(tmp_path_factory.mktemp("localhub")) as hub:
        yield hub


@pytest.fixture
def publish(run_python, served: LocalHub, tmp_path: Path):
    """Publishes all repositories; gives the commits of their versions."""

    def run(card: str = "card", names=sources.REPOSITORIES, **changes: bytes) -> dict[str, str]:
        code = PUBLISH.format(names=names, root=str(sources.root("bundled")), card=card, changes=changes)
        environment = served.environment(tmp_path / "publisher") | {"HF_HUB_DISABLE_XET": "1"}
        return dict(zip(names, run_python(code, **environment).stdout.split()))

    return run


def commits(archive: Path) -> dict[str, str]:
    return {each.name: each.commit for each in bundle_archive.unpack(archive)}


def at(home: Path) -> dict[str, str]:
    return {"HF_HOME": str(home), **OFFLINE}


def test_from_the_hub_to_a_machine_without_a_network(run_python, served, publish, tmp_path: Path) -> None:
    published = publish("first")
    online, archive, home = served.environment(tmp_path / "connected"), tmp_path / "kernels.zip", tmp_path / "cluster"
    run_python(COMMAND, "bundle", "--source", "hub", "--output", str(archive), **online)
    assert commits(archive) == published
    (norm,) = [each for each in bundle_archive.unpack(archive) if each.name == "RMSNorm"]
    assert {"README.md", ".gitattributes", "benchmarks/large.bin"} <= norm.files.keys()
    run_python(COMMAND, "bundle", "--source", "hub", "--output", str(tmp_path / "again.zip"), **online)
    assert (tmp_path / "again.zip").read_bytes() == archive.read_bytes()

    run_python(COMMAND, "bundle", "--install", str(archive), **at(home))
    folder = home / "hub" / "kernels--kernels-ext-npu--RMSNorm"
    file = run_python(LOAD, **at(home)).stdout.strip()
    assert file == f"{folder}/snapshots/{published['RMSNorm']}/build/torch-npu/__init__.py"

    newer = publish("second")  # and an update, by the same way
    run_python(COMMAND, "bundle", "--source", "hub", "--output", str(archive), **online)
    output = run_python(COMMAND, "bundle", "--install", str(archive), **at(home)).stdout
    before, after = published["RMSNorm"], newer["RMSNorm"]
    assert f"RMSNorm v1, commit {after}: in place of {before}, whose files stay in the cache\n" in output
    assert (folder / "refs" / "v1").read_text() == after
    assert {path.name for path in (folder / "snapshots").iterdir()} == {before, after}


def test_what_kernels_has_downloaded_itself_works_offline_after_an_installation(
    run_python, served, publish, tmp_path: Path
) -> None:
    publish("third")
    online, archive = served.environment(tmp_path / "home"), tmp_path / "kernels.zip"
    file = run_python(LOAD, **online).stdout
    result = run_python(LOAD, check=False, **at(tmp_path / "home"))
    assert "is not available in the local cache" in result.stderr  # no refs/v1, and one variant of five
    run_python(COMMAND, "bundle", "--source", "hub", "--output", str(archive), **online)
    run_python(COMMAND, "bundle", "--install", str(archive), **at(tmp_path / "home"))
    assert run_python(LOAD, **at(tmp_path / "home")).stdout == file


def test_a_mirror_serves_kernels_and_models(run_python, served, publish, tmp_path: Path) -> None:
    """All that is set is HF_ENDPOINT, and where the cache is."""
    published = publish("fourth")
    environment = {"HF_ENDPOINT": served.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
    assert published["RMSNorm"] in run_python(LOAD, **environment).stdout
    output = " ".join(run_python(REGISTER, **environment).stdout.split())
    assert "3 of 3 norms, 1 of 1 gated MLPs, 1 of 1 rotary calls, 1 of 1 rotary tables swapped" in output


def test_what_is_wrong_on_the_hub_is_not_bundled(run_python, served, publish, tmp_path: Path) -> None:
    publish("fifth")
    layers = "build/torch-npu/layers.py"
    publish("sixth", ["RMSNorm"], **{layers: b"import os"})
    environment, archive = served.environment(tmp_path / "home"), tmp_path / "kernels.zip"
    arguments = ["bundle", "--source", "hub", "--output", str(archive)]
    result = run_python(COMMAND, *arguments, check=False, **environment)
    assert (result.returncode, result.stdout) == (1, "")
    assert "RMSNorm/build/torch-npu: layers.py: changed, its digest differs" in result.stderr

    publish("seventh", ["RMSNorm"])
    served.faults.add("cut", path="resolve", after=100) if False else None
    repository = served.store.get("kernel", "kernels-ext-npu/SwiGLU")
    repository.delete_ref("branches", "v1")
    result = run_python(COMMAND, *arguments, check=False, **environment)
    assert result.returncode == 1
    assert (
        f"kernels-ext-npu/SwiGLU cannot be downloaded from {served.url}: kernels-ext-npu/SwiGLU has no version 1"
        in (result.stderr)
    )
    served.store.delete("kernel", "kernels-ext-npu/FusedMoE")
    result = run_python(COMMAND, *arguments, check=False, **environment)
    assert result.returncode == 1
    assert f"kernels-ext-npu/FusedMoE cannot be downloaded from {served.url}: 404" in result.stderr
    for refusing in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        result = run_python(COMMAND, *arguments, check=False, **environment | refusing)
        assert result.returncode == 1
        assert "cannot be downloaded from" in result.stderr
        assert "Traceback" not in result.stderr
    assert not archive.exists()
