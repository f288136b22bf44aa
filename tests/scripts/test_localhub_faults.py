"""The Hub of the tests: that each fault does what it says, at the request that it names."""

import contextlib
import http.client
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError

from tests.localhub import LocalHub
from tests.localhub.client import REPOSITORY, TOKEN, Client

COMMIT = {"method": "POST", "path": "*/commit/main"}
LOST = httpx2.RemoteProtocolError, httpx2.NetworkError


def get(hub: LocalHub, path: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(hub.url.removeprefix("http://"))
    connection.request("GET", path, headers={"Authorization": f"Bearer {TOKEN}"})
    return connection.getresponse()


# ---- kinds -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "fields", "error"),
    [("refuse", {}, httpx2.ReadError), ("cut", {}, httpx2.RemoteProtocolError), ("status", {}, HfHubHTTPError)],
)
def test_it_comes_before_the_effect(localhub: LocalHub, client: Client, kind: str, fields: dict, error: type) -> None:
    head = client.head()
    localhub.faults.add(kind, **COMMIT, **fields)
    with pytest.raises(error):
        client.commit({"a.py": b"1"})
    assert localhub.requests[-1].fault == kind
    assert client.head() == head
    assert client.commit({"a.py": b"1"}).oid == client.head() != head


@pytest.mark.parametrize(
    ("kind", "fields", "error"),
    [
        ("lose", {}, httpx2.RemoteProtocolError),
        ("truncate", {"size": 10}, httpx2.RemoteProtocolError),
        ("truncate", {"size": 10_000}, httpx2.RemoteProtocolError),
        ("status", {"status": 500, "applied": True}, HfHubHTTPError),
    ],
)
def test_it_comes_after_the_effect(localhub: LocalHub, client: Client, kind: str, fields: dict, error: type) -> None:
    head = client.head()
    localhub.faults.add(kind, **COMMIT, **fields)
    with pytest.raises(error):
        client.commit({"a.py": b"1"})
    assert [each.id for each in localhub.store.get("kernels", REPOSITORY).history("main")] == [client.head(), head]
    assert client.commit({"a.py": b"1"}).oid == client.head()


@pytest.mark.parametrize("status", [409, 412, 429, 500, 503])
def test_a_status_is_answered_without_effect(localhub: LocalHub, client: Client, status: int) -> None:
    localhub.faults.add("status", **COMMIT, status=status)
    with pytest.raises(HfHubHTTPError) as caught:
        client.commit({"a.py": b"1"})
    assert caught.value.response.status_code == localhub.requests[-1].status == status
    assert ("Retry-After" in caught.value.response.headers) == (status in (429, 503))
    assert client.paths() == [".gitattributes"]


def test_a_conflict_at_creation_is_one_that_passes(localhub: LocalHub, client: Client) -> None:
    """The client tries again at once where another creation is in progress; where the repository exists it does not."""
    localhub.faults.add("status", path="/api/repos/create", status=409)
    client.api.create_repo("kernels-ext-npu/RoPE", repo_type="kernel")
    assert [request.status for request in localhub.requests[-2:]] == [409, 200]


def test_a_delay_is_only_late(localhub: LocalHub, client: Client) -> None:
    localhub.faults.add("delay", **COMMIT, seconds=0.3)
    start = time.monotonic()
    client.commit({"a.py": b"1"})
    assert time.monotonic() - start >= 0.3
    assert client.paths() == [".gitattributes", "a.py"]


def test_for_a_while_nobody_listens(localhub: LocalHub, client: Client) -> None:
    localhub.faults.add("refuse", path="*/refs", seconds=60)
    with pytest.raises(LOST):
        client.list_repo_refs()
    for _ in range(2):
        with pytest.raises(httpx2.ConnectError):
            client.list_repo_refs()


def test_then_it_listens_again(localhub: LocalHub, client: Client) -> None:
    localhub.faults.add("refuse", path="*/refs", seconds=0.2)
    with pytest.raises(LOST):
        client.list_repo_refs()
    while True:
        with contextlib.suppress(httpx2.ConnectError):
            assert len(client.list_repo_refs().branches) == 1
            break


def test_a_server_that_is_away_can_be_stopped(tmp_path: Path) -> None:
    away, start = 60, time.monotonic()
    with LocalHub(tmp_path) as hub:
        hub.faults.add("refuse", seconds=away)
        with pytest.raises(ConnectionResetError):
            get(hub, "/api/whoami-v2")
    assert time.monotonic() - start < away


@pytest.mark.parametrize("kind", ["refuse", "cut", "lose", "status"])
def test_a_large_upload_fails_in_the_same_ways(localhub: LocalHub, client: Client, kind: str) -> None:
    localhub.faults.add(kind, **COMMIT)
    with pytest.raises((*LOST, HfHubHTTPError)):
        client.commit({"a.py": bytes(3_000_000)})
    assert len(localhub.store.get("kernels", REPOSITORY).history("main")) == (2 if kind == "lose" else 1)


# ---- what the clients do about it ------------------------------------------------------------------------------------
def test_the_client_tries_again_when_it_is_told_to(localhub: LocalHub, client: Client) -> None:
    localhub.faults.add("status", path="*/tree/*", status=503)
    assert client.paths() == [".gitattributes"]
    assert [request.status for request in localhub.requests[-2:]] == [503, 200]


def test_the_client_repeats_a_download_that_was_cut(localhub: LocalHub, client: Client, tmp_path: Path) -> None:
    content = bytes(range(256)) * 10
    client.commit({"a.bin": content})
    localhub.faults.add("truncate", method="GET", path="*/resolve/*", size=1000)
    path = hf_hub_download(REPOSITORY, "a.bin", repo_type="kernel", endpoint=localhub.url, cache_dir=tmp_path)
    assert Path(path).read_bytes() == content
    answers = [(request.method, request.status, request.fault) for request in localhub.requests[-2:]]
    assert answers == [("GET", 200, "truncate"), ("GET", 200, None)]


# ---- which request ---------------------------------------------------------------------------------------------------
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
    assert [(fault.kind, matched) for fault, (matched,) in localhub.faults.planned] == [("status", 4)]
    localhub.faults.clear()
    assert localhub.faults.planned == []


def test_every_request_of_a_sequence_can_be_hit(localhub: LocalHub, client: Client) -> None:
    def publish() -> None:
        client.create_branch(branch="v1", exist_ok=True)
        client.commit({"a.py": b"1"}, revision="v1", parent_commit=client.head("v1"))

    before = len(localhub.requests)
    publish()
    expected = [(request.method, request.path) for request in localhub.requests[before:]]
    assert [path.rpartition("RMSNorm/")[2] for _, path in expected] == [
        "branch/v1",
        "revision/v1",
        "preupload/v1",
        "commit/v1",
    ]
    for number, (method, path) in enumerate(expected, 1):
        client.delete_branch(branch="v1")
        localhub.faults.add("cut", at=number)
        # the client asks a second time how to upload, for itself
        if "preupload" in path:
            publish()
        else:
            with pytest.raises(httpx2.RemoteProtocolError):
                publish()
        (hit,) = [request for request in localhub.requests if request.fault is not None]
        assert (hit.method, hit.path, hit.status) == (method, path, None)
        localhub.faults.clear()
        localhub.requests.clear()
        publish()


@pytest.mark.parametrize(
    "fields", [{"kind": "explode"}, {"kind": "cut", "at": 0}, {"kind": "cut", "times": 0}, {"kind": "cut", "on": "*"}]
)
def test_a_fault_that_cannot_be_is_refused(localhub: LocalHub, fields: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        localhub.faults.add(**fields)
    assert localhub.faults.planned == []
