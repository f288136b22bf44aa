"""The Hub of the tests: its faults do what they say. Tests of publishing see all else of it."""

from pathlib import Path

import httpx2
import pytest
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError

from tests.localhub import LocalHub
from tests.localhub.client import REPOSITORY, Client

COMMIT = {"method": "POST", "path": "*/commit/main"}
LOST = httpx2.RemoteProtocolError, httpx2.NetworkError


def history(hub: LocalHub) -> list[str]:
    return [commit.id for commit in hub.store.get("kernels", REPOSITORY).history("main")]


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
