"""The kernels of the project: published by the command, and loaded by the real client in a fresh process."""

import json
from pathlib import Path

import build
import pytest
from huggingface_hub import HfApi

from kernels_ext_npu.distribution.variants import names, repositories
from publishing import afterwards, local
from publishing.apply import apply
from publishing.plan import Wanted
from publishing.remote import Patience, Remote, RemoteError, explain
from tests.support.tiny import held

SCRIPT = str(build.ROOT / "scripts" / "publish.py")
TOKEN = "hf_AVeryRecognisableTokenOfTheTests"


@pytest.mark.long
def test_all_are_published_loaded_and_run_and_the_token_is_nowhere(localhub, run_python, tmp_path: Path) -> None:
    """In nothing that is printed or written, whether it works, is refused, or the server answers with an error."""
    environment = localhub.environment(tmp_path / "home") | {"HF_TOKEN": TOKEN}
    printed = ""

    def run(status: int, *arguments: str, **further: str) -> str:
        nonlocal printed
        result = run_python(None, SCRIPT, *arguments, check=False, **environment, **further)
        printed += result.stdout + result.stderr
        assert result.returncode == status, result.stderr
        return result.stdout

    for repository in repositories(build.ROOT):
        report = json.loads(run(0, repository.name, "--json"))
        assert report["status"] == "published"
        assert report["loaded"] | {"refusal": ""} == {"variant": "torch-npu", "ran": True, "refusal": ""}
        content = build.render(repository, names(build.ROOT))  # all variants, also those that the tree leaves out
        repo_id = f"kernels-ext-npu/{repository.name}"
        assert held(localhub, "v1", repo_id) == {f"build/{path}": text for path, text in content.items()}
        assert report["branches"]["v1"]["commit"] == localhub.repository(repo_id).commit("v1").id
    run(0, "SwiGLU", "--dry-run")
    run(1, "SwiGLU", "--variant", "missing")
    localhub.faults.add("status", status=403, path="*/refs", times=100)
    assert json.loads(run(2, "SwiGLU", "--json", HF_DEBUG="1"))["status"] == "failed"
    assert any(request.authorized for request in localhub.requests)
    assert TOKEN not in printed
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in written if TOKEN.encode() in path.read_bytes()] == []


def test_a_token_that_a_server_repeats_is_hidden(monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert explain(OSError(f"no access for Bearer {TOKEN}")) == "no access for Bearer <token>"


@pytest.mark.long
def test_each_request_of_the_process_that_loads_may_fail(localhub, online) -> None:
    remote = Remote(HfApi(endpoint=localhub.url), "kernels-ext-npu/SwiGLU", Patience(seconds=0))
    found = local.find("SwiGLU", ("torch-npu",))
    applied = apply(remote, Wanted("v1", found.files(), ("build/torch-npu/",)), "Publish")
    start = len(localhub.requests)
    assert afterwards.check_loading(remote, 1, applied)["ran"]
    requests = len(localhub.requests) - start
    for at in range(1, requests + 1):
        localhub.faults.add("cut" if at % 2 else "status", at=at)
        assert afterwards.check_loading(remote, 1, applied)["variant"] == "torch-npu"
        localhub.faults.clear()
    localhub.faults.add("status", times=10**6)
    with pytest.raises(RemoteError, match="version 1 does not load"):
        afterwards.check_loading(remote, 1, applied)
