"""The kernels of the project: published by the command, and loaded by the real clients in fresh processes."""

import json
from ast import literal_eval
from pathlib import Path

import build
import pytest
from huggingface_hub import HfApi

from kernels_ext_npu.distribution.variants import names, repositories
from publishing import afterwards, local
from publishing.apply import apply
from publishing.plan import Wanted
from publishing.remote import Patience, Remote, RemoteError, explain
from tests.localhub import LocalHub
from tests.support.tiny import held

SCRIPT = str(build.ROOT / "scripts" / "publish.py")
TOKEN = "hf_AVeryRecognisableTokenOfTheTests"
NAMES = [repository.name for repository in repositories(build.ROOT)]
LOADED = {"variant": "torch-npu", "ran": True, "refusal": ""}

USE = """
import sys, pathlib
import softnpu
import torch
import kernels_ext_npu
from kernels import get_kernel, get_loaded_kernels
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

names = sys.argv[2:]
for name in names:
    kernel = get_kernel(f"kernels-ext-npu/{name}", version=1, trust_remote_code=[f"kernels-ext-npu/{name}"])
    assert "torch_npu" in kernel.__name__, kernel.__name__

sizes = dict(hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2, vocab_size=64)
heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes, **heads, mlp_only_layers=[0]))
model.save_pretrained(sys.argv[1])
ids = torch.arange(8)[None]
expected = model(ids).logits
kernels_ext_npu.register(source="hub")
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], device_map="npu", use_kernels=True)
torch.testing.assert_close(model(ids.npu()).logits.cpu(), expected, rtol=1e-4, atol=1e-4)
print(sorted({row.kernel for row in kernels_ext_npu.report(model) if row.swapped}))
print(sorted(str(pathlib.Path(kernel.module.__file__).parent) for kernel in get_loaded_kernels()))
"""


def content(name: str) -> dict[str, bytes]:
    """Return what its branch has to hold: all variants, also those that the tree leaves out."""
    content = build.render(build.ROOT / name, names(build.ROOT))
    return {f"build/{path}": content for path, content in content.items()}


@pytest.fixture
def environment(localhub: LocalHub, tmp_path: Path) -> dict[str, str]:
    localhub.settings.token = TOKEN
    return localhub.environment(tmp_path / "home")


@pytest.mark.long
def test_all_four_are_published_loaded_and_used(localhub, environment, run_python, tmp_path) -> None:
    for name in NAMES:
        report = json.loads(run_python(None, SCRIPT, name, "--json", **environment).stdout)
        assert report["status"] == "published"
        assert report["loaded"] | {"refusal": ""} == LOADED
        assert held(localhub, "v1", f"kernels-ext-npu/{name}") == content(name)
        commit = localhub.store.get("kernels", f"kernels-ext-npu/{name}").commit("v1").id
        assert report["branches"]["v1"]["commit"] == commit
    fresh = localhub.environment(tmp_path / "fresh")
    swapped, loaded = run_python(USE, str(tmp_path / "model"), *NAMES, **fresh).stdout.splitlines()[-2:]
    assert {"RMSNorm", "SwiGLUMLP", "RotaryPosEmb", "MoEExperts"} <= set(literal_eval(swapped))
    assert all(str(tmp_path / "fresh") in path for path in literal_eval(loaded))
    assert {Path(path).parts[-5] for path in literal_eval(loaded)} == {
        f"kernels--kernels-ext-npu--{name}" for name in NAMES
    }


@pytest.mark.long
def test_the_token_is_nowhere(localhub, environment, run_python, tmp_path) -> None:
    """In nothing that is printed or written, whether it works, is refused, or the server repeats what it was sent.

    What is published here, loaded and run is one of them, as `make test-slow` does with all of them.
    """
    outputs = []
    for arguments in (["SwiGLU", "--json"], ["SwiGLU", "--dry-run"], ["SwiGLU", "--variant", "missing"]):
        result = run_python(None, SCRIPT, *arguments, check=False, **environment)
        outputs.append(result)
    assert [result.returncode for result in outputs] == [0, 0, 1]
    localhub.faults.add("status", status=403, path="*/refs", times=100)
    outputs.append(run_python(None, SCRIPT, "SwiGLU", "--json", check=False, **environment | {"HF_DEBUG": "1"}))
    assert outputs[-1].returncode == 2
    assert json.loads(outputs[-1].stdout)["status"] == "failed"
    assert json.loads(outputs[0].stdout)["status"] == "published"
    assert json.loads(outputs[0].stdout)["loaded"] | {"refusal": ""} == LOADED
    assert held(localhub, "v1", "kernels-ext-npu/SwiGLU") == content("SwiGLU")
    assert any(request.authorized for request in localhub.faults.requests)
    for result in outputs:
        assert TOKEN not in result.stdout + result.stderr
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in written if TOKEN.encode() in path.read_bytes()] == []


def test_a_token_that_a_server_repeats_is_hidden(monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert explain(OSError(f"no access for Bearer {TOKEN}")) == "no access for Bearer <token>"


@pytest.mark.long
def test_each_request_of_the_process_that_loads_may_fail(localhub, online, capsys) -> None:
    remote = Remote(HfApi(endpoint=localhub.url), "kernels-ext-npu/SwiGLU", Patience(seconds=0))
    found = local.find("SwiGLU", ("torch-npu",))
    applied = apply(remote, Wanted("v1", found.files(), ("build/torch-npu/",)), "Publish")
    start = len(localhub.faults.requests)
    assert afterwards.check_loading(remote, 1, applied)["ran"]
    requests = len(localhub.faults.requests) - start
    for at in range(1, requests + 1):
        localhub.faults.add("cut" if at % 2 else "status", at=at)
        assert afterwards.check_loading(remote, 1, applied)["variant"] == "torch-npu"
        localhub.faults.clear()
    localhub.faults.add("status", times=10**6)
    with pytest.raises(RemoteError, match="version 1 does not load"):
        afterwards.check_loading(remote, 1, applied)
    with capsys.disabled():
        print(f"\nloading: {requests} points, all of them loaded")
