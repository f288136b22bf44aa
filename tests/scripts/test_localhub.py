"""The Hub of the tests: the real clients find in it what they expect of the Hub, and each fault does what it says."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tests.localhub import LocalHub
from tests.localhub.client import REPOSITORY, TOKEN, Client

ROOT = Path(__file__).parent.parent.parent
COMMIT = {"method": "POST", "path": "*/commit/main"}
LOST = httpx2.RemoteProtocolError, httpx2.NetworkError


def history(hub: LocalHub, branch: str = "main") -> list[str]:
    return [commit.id for commit in hub.store.get("kernels", REPOSITORY).history(branch)]


# ---- repositories and references -------------------------------------------------------------------------------------
def test_what_exists_is_a_conflict_and_what_is_missing_is_named(client: Client, tmp_path: Path) -> None:
    client.create_branch(branch="v1")
    for create, arguments in ((client.create_repo, {}), (client.create_branch, {"branch": "v1"})):
        with pytest.raises(HfHubHTTPError) as caught:
            create(**arguments)
        assert caught.value.response.status_code == 409
        create(exist_ok=True, **arguments)
    assert [branch.name for branch in client.list_repo_refs().branches] == ["main", "v1"]
    client.delete_branch(branch="v1")
    assert [branch.name for branch in client.list_repo_refs().branches] == ["main"]
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


# ---- who may ask -----------------------------------------------------------------------------------------------------
def test_tokens_rights_and_trust_are_those_of_the_settings(localhub: LocalHub, client: Client) -> None:
    client.commit({"a.py": b"1"})
    assert all(request.authorized for request in localhub.requests)
    localhub.settings.token = "another"
    with pytest.raises(HfHubHTTPError, match="Invalid credentials"):
        client.paths()
    anonymous = Client(localhub.url, token=False)
    assert anonymous.paths() == [".gitattributes", "a.py"]
    with pytest.raises(HfHubHTTPError) as caught:
        anonymous.create_branch(branch="v1")
    assert caught.value.response.status_code == 401
    localhub.settings.token, localhub.settings.may_create = TOKEN, False
    client.create_branch(branch="v1")
    assert client.api.whoami()["name"] == "tester"
    with pytest.raises(HfHubHTTPError, match="You don't have the rights"):
        client.api.create_repo("kernels-ext-npu/RoPE", repo_type="kernel")
    assert not client.api.get_organization_overview("kernels-ext-npu").trustedKernelPublisher
    localhub.settings.trusted.add("kernels-ext-npu")
    assert client.api.get_organization_overview("kernels-ext-npu").trustedKernelPublisher
    with pytest.raises(HfHubHTTPError, match="does not exist"):
        client.api.get_organization_overview("nobody")


# ---- files and commits -----------------------------------------------------------------------------------------------
def test_only_what_changed_is_committed(client: Client) -> None:
    first = client.commit({"a.py": b"1", "b.py": b"1"})
    assert client.commit({"a.py": b"1", "b.py": b"1"}).oid == first.oid
    added = [CommitOperationAdd(path, b"1") for path in ("build/x/c.py", "build/y/d.py")]
    client.create_commit([CommitOperationDelete("b.py"), *added], commit_message="all at once")
    assert client.paths() == [".gitattributes", "a.py", "build/x/c.py", "build/y/d.py"]
    assert [entry.path for entry in client.list_repo_tree("build")] == ["build/x", "build/y"]
    client.create_commit([CommitOperationDelete("build/x/")], commit_message="a folder")
    assert client.paths() == [".gitattributes", "a.py", "build/y/d.py"]


def test_a_card_is_validated_before_it_is_committed(client: Client) -> None:
    for wrong in (b"---\nlicense: [\n---\n", b"---\nlicense: Apache 2\n---\n", b"---\na list\n---\n"):
        with pytest.raises(ValueError, match=r"Invalid metadata in README\.md"):
            client.commit({"README.md": wrong})
    with pytest.warns(UserWarning, match="empty or missing yaml metadata"):
        client.commit({"README.md": b"no front matter"})
    client.commit({"README.md": (ROOT / "RMSNorm" / "README.md").read_bytes()})


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
    assert history(localhub) == [winner, parent]
    assert len(client.paths()) == 2


# ---- faults ----------------------------------------------------------------------------------------------------------
FAULTS = [  # what goes wrong, whether the commit is made all the same, and what the client says
    ("refuse", {}, False, httpx2.ReadError),
    ("cut", {}, False, httpx2.RemoteProtocolError),
    ("lose", {}, True, httpx2.RemoteProtocolError),
    ("truncate", {"size": 10}, True, httpx2.RemoteProtocolError),
    ("truncate", {"size": 10_000}, True, httpx2.RemoteProtocolError),
    ("status", {"status": 500, "applied": True}, True, HfHubHTTPError),
    *(("status", {"status": status}, False, HfHubHTTPError) for status in (409, 412, 429, 500, 503)),
]


@pytest.mark.parametrize("content", [b"1", bytes(3_000_000)], ids=["small", "large"])
@pytest.mark.parametrize(("kind", "fields", "is_made", "error"), FAULTS)
def test_a_fault_comes_before_the_effect_or_behind_it(localhub, client, kind, fields, is_made, error, content) -> None:
    localhub.faults.add(kind, **COMMIT, **fields)
    with pytest.raises((*LOST, error) if len(content) > 1 else error) as caught:
        client.commit({"a.py": content})
    hit = localhub.requests[-1]
    assert (hit.fault, len(history(localhub))) == (kind, 2 if is_made else 1)
    if kind == "status":
        assert caught.value.response.status_code == hit.status == fields["status"]
        assert ("Retry-After" in caught.value.response.headers) == (hit.status in (429, 503))
    assert client.commit({"a.py": content}).oid == client.head()
    assert len(history(localhub)) == 2


def test_a_conflict_at_creation_is_one_that_passes(localhub: LocalHub, client: Client) -> None:
    """The client tries again at once where another creation is in progress; where the repository exists it does not."""
    localhub.faults.add("status", path="/api/repos/create", status=409)
    client.api.create_repo("kernels-ext-npu/RoPE", repo_type="kernel")
    assert [request.status for request in localhub.requests[-2:]] == [409, 200]


@pytest.mark.usefixtures("online")
def test_the_client_repeats_what_it_may_and_a_download_that_was_cut(localhub, client, tmp_path: Path) -> None:
    content = bytes(range(256)) * 10
    client.commit({"a.bin": content})
    localhub.faults.add("status", path="*/tree/*", status=503)
    assert client.paths() == [".gitattributes", "a.bin"]
    assert [request.status for request in localhub.requests[-2:]] == [503, 200]
    localhub.faults.add("truncate", method="GET", path="*/resolve/*", size=1000)
    path = hf_hub_download(REPOSITORY, "a.bin", repo_type="kernel", endpoint=localhub.url, cache_dir=tmp_path)
    assert Path(path).read_bytes() == content
    assert [request.fault for request in localhub.requests[-2:]] == ["truncate", None]


def test_requests_are_counted_by_what_they_match(localhub: LocalHub, client: Client) -> None:
    localhub.faults.add("status", method="GET", path="/api/kernels/*/refs", at=2, times=2, status=500)
    outcomes = []
    for _ in range(4):
        client.head()
        try:
            outcomes.append(len(client.list_repo_refs().branches))
        except HfHubHTTPError as error:
            outcomes.append(error.response.status_code)
    assert outcomes == [1, 500, 500, 1]


@pytest.mark.parametrize(
    "fields", [{"kind": "explode"}, {"kind": "cut", "at": 0}, {"kind": "cut", "times": 0}, {"kind": "cut", "on": "*"}]
)
def test_a_fault_that_cannot_be_is_refused(localhub: LocalHub, fields: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        localhub.faults.add(**fields)
    assert localhub.faults.planned == []
