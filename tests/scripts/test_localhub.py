"""The Hub of the tests: that the real clients find in it what they expect of the Hub."""

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    hf_hub_download,
    hf_hub_url,
    snapshot_download,
)
from huggingface_hub.errors import (
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tests.localhub import LocalHub
from tests.localhub.client import REPOSITORY, Client

ROOT = Path(__file__).parent.parent.parent


# ---- kernels ---------------------------------------------------------------------------------------------------------
PUBLISH = """
import sys
from pathlib import Path
from huggingface_hub import CommitOperationAdd, HfApi
api, repository = HfApi(), {"repo_id": "kernels-ext-npu/RMSNorm", "repo_type": "kernel"}
api.create_repo(**repository)
api.create_branch(**repository, branch="v1")
folder = Path(sys.argv[1])
files = [path for path in (folder / "build").rglob("*") if path.is_file() and path.parent.name != "__pycache__"]
api.create_commit(
    **repository,
    operations=[CommitOperationAdd(str(path.relative_to(folder)), path) for path in files],
    commit_message="build",
    revision="v1",
    parent_commit=api.repo_info(**repository, revision="v1").sha,
)
api.upload_file(**repository, path_or_fileobj=folder / "README.md", path_in_repo="README.md")
"""
LOAD = """
import softnpu, torch
from kernels import get_kernel
repository = "kernels-ext-npu/RMSNorm"
try:
    get_kernel(repository, version=1)
except ValueError as error:
    print(error)
kernel = get_kernel(repository, version=1, trust_remote_code=[repository])
x = torch.randn(2, 8)
torch.testing.assert_close(kernel.rms_norm(x.npu(), None, 1e-6).cpu(), torch.nn.functional.rms_norm(x, (8,), eps=1e-6))
"""


def test_a_kernel_that_was_published_loads_and_computes(localhub: LocalHub, run_forked, tmp_path: Path) -> None:
    run_forked(PUBLISH, str(ROOT / "RMSNorm"), **localhub.environment(tmp_path / "publisher"))
    published = len(localhub.requests)
    output = run_forked(LOAD, **localhub.environment(tmp_path / "user")).stdout
    assert "is not from a trusted publisher" in output
    loaded = [request.path for request in localhub.requests[published:] if "/resolve/" in request.path]
    assert loaded
    assert all("/build/torch-npu/" in path for path in loaded)


def test_a_trusted_organisation_says_so(localhub: LocalHub, client: Client) -> None:
    assert not client.api.get_organization_overview("kernels-ext-npu").trustedKernelPublisher
    localhub.settings.trusted.add("kernels-ext-npu")
    assert client.api.get_organization_overview("kernels-ext-npu").trustedKernelPublisher
    with pytest.raises(HfHubHTTPError, match="does not exist"):
        client.api.get_organization_overview("nobody")


# ---- repositories and references -------------------------------------------------------------------------------------
def test_what_exists_is_a_conflict(client: Client) -> None:
    client.create_branch(branch="v1")
    for create, arguments in (("repo", {}), ("branch", {"branch": "v1"})):
        with pytest.raises(HfHubHTTPError) as caught:
            getattr(client, f"create_{create}")(**arguments)
        assert caught.value.response.status_code == 409
        getattr(client, f"create_{create}")(exist_ok=True, **arguments)
    assert [branch.name for branch in client.list_repo_refs().branches] == ["main", "v1"]
    client.delete_branch(branch="v1")
    assert [branch.name for branch in client.list_repo_refs().branches] == ["main"]


def test_what_is_missing_is_named(client: Client, tmp_path: Path) -> None:
    with pytest.raises(RepositoryNotFoundError):
        client.api.repo_info("kernels-ext-npu/RoPE", repo_type="kernel")
    with pytest.raises(RevisionNotFoundError):
        client.list_repo_files(revision="v1")
    with pytest.raises(RemoteEntryNotFoundError):
        hf_hub_download(REPOSITORY, "a.py", repo_type="kernel", endpoint=client.api.endpoint, cache_dir=tmp_path)
    assert len(list(tmp_path.rglob(f".no_exist/{client.head()}/a.py"))) == 1
    with pytest.raises(RemoteEntryNotFoundError, match="A file with this name doesn't exist"):
        client.create_commit([CommitOperationDelete("a.py")], commit_message="nothing to delete")


def test_a_pull_request_leaves_its_branch_alone(client: Client) -> None:
    client.create_branch(branch="v1")
    proposed = client.commit({"a.py": b"1"}, revision="v1", create_pr=True)
    assert (proposed.pr_revision, proposed.pr_num) == ("refs/pr/1", 1)
    assert client.head("refs/pr/1") == proposed.oid != client.head("v1")
    client.commit({"b.py": b"1"}, revision="refs/pr/1")
    assert client.paths("refs/pr/1") == [".gitattributes", "a.py", "b.py"]
    refs = client.list_repo_refs(include_pull_requests=True)
    assert [pull.ref for pull in refs.pull_requests] == ["refs/pr/1"]


def test_a_model_repository_is_another_one(client: Client, tmp_path: Path) -> None:
    models = Client(client.api.endpoint, repo_type="model")
    models.create_repo()
    models.commit({"build/torch-npu/__init__.py": b"x = 1"})
    folder = snapshot_download(REPOSITORY, endpoint=client.api.endpoint, cache_dir=tmp_path, allow_patterns="build/*")
    assert (Path(folder) / "build/torch-npu/__init__.py").read_text() == "x = 1"
    assert client.paths() == [".gitattributes"]
    assert [sibling.rfilename for sibling in models.repo_info().siblings] == models.paths()


# ---- files -----------------------------------------------------------------------------------------------------------
def test_listings_are_of_a_folder_or_of_all_in_it(client: Client) -> None:
    client.commit({f"build/v{number}/a.py": b"%d" % number for number in range(5)})
    entries = list(client.list_repo_tree("build", recursive=True))
    assert [entry.path for entry in entries] == [f"build/v{n}{end}" for n in range(5) for end in ("", "/a.py")]
    assert [entry.path for entry in client.list_repo_tree()] == [".gitattributes", "build"]
    assert [entry.path for entry in client.list_repo_tree("build")] == [f"build/v{n}" for n in range(5)]
    assert [entry.path for entry in client.get_paths_info(["build", "build/v1/a.py", "missing"])] == [
        "build",
        "build/v1/a.py",
    ]


def test_only_what_changed_is_committed(client: Client) -> None:
    first = client.commit({"a.py": b"1", "b.py": b"1"})
    assert client.commit({"a.py": b"1", "b.py": b"1"}).oid == first.oid
    client.create_commit(
        [
            CommitOperationDelete("b.py"),
            CommitOperationAdd("build/x/c.py", b"1"),
            CommitOperationAdd("build/y/d.py", b"1"),
        ],
        commit_message="all at once",
    )
    assert client.paths() == [".gitattributes", "a.py", "build/x/c.py", "build/y/d.py"]
    client.create_commit([CommitOperationDelete("build/x/")], commit_message="a folder")
    assert client.paths() == [".gitattributes", "a.py", "build/y/d.py"]


@pytest.mark.parametrize(
    ("asked", "status", "answered"),
    [("2-4", 206, b"234"), ("7-", 206, b"789"), ("-1", 206, b"9"), ("10-", 416, b""), ("0-99", 206, b"0123456789")],
)
def test_a_part_of_a_file_can_be_asked_for(client: Client, asked: str, status: int, answered: bytes) -> None:
    commit = client.commit({"a.py": b"0123456789"})
    url = hf_hub_url(REPOSITORY, "a.py", repo_type="kernel", revision=commit.oid)
    response = httpx2.get(url, headers={"Range": f"bytes={asked}"})
    assert (response.status_code, response.content) == (status, answered)


def test_a_card_is_validated_before_it_is_committed(client: Client) -> None:
    for wrong in (b"---\nlicense: [\n---\n", b"---\nlicense: Apache 2\n---\n", b"---\na list\n---\n"):
        with pytest.raises(ValueError, match=r"Invalid metadata in README\.md"):
            client.commit({"README.md": wrong})
    with pytest.warns(UserWarning, match="empty or missing yaml metadata"):
        client.commit({"README.md": b"no front matter"})
    client.commit({"README.md": (ROOT / "RMSNorm" / "README.md").read_bytes()})


# ---- commits ---------------------------------------------------------------------------------------------------------
def test_of_concurrent_commits_on_one_parent_exactly_one_wins(localhub: LocalHub, client: Client) -> None:
    parent = client.head()

    def commit(number: int) -> str:
        try:
            return client.commit({f"{number}.py": b"1"}, parent_commit=parent).oid
        except HfHubHTTPError as error:
            return str(error)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(commit, range(8)))
    refused = [answer for answer in answers if "412" in answer and "A commit has happened since" in answer]
    (winner,) = set(answers) - set(refused)
    assert len(refused) == 7
    assert [each.id for each in localhub.store.get("kernels", REPOSITORY).history("main")] == [winner, parent]
    assert len(client.paths()) == 2


def test_what_was_committed_outlives_a_server_that_is_killed(tmp_path: Path, client: Client) -> None:
    command = [sys.executable, "-m", "tests.localhub", "--root", str(tmp_path / "kept")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        elsewhere = Client(process.stdout.readline().strip())
        elsewhere.create_repo()
        head = elsewhere.commit({"a.py": b"1"}).oid
        with pytest.raises(RuntimeError, match="another server has"):
            LocalHub(tmp_path / "kept").start()
        process.send_signal(signal.SIGKILL)
    with LocalHub(tmp_path / "kept") as hub:
        again = Client(hub.url)
        assert again.head() == head
        assert again.commit({"b.py": b"1"}, parent_commit=head).oid == again.head()
        assert again.paths() == [".gitattributes", "a.py", "b.py"]
