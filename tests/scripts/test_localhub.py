"""The Hub of the tests: its faults do what they say, to the real client. Tests of publishing see all else of it."""

import httpx2
import pytest
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError

REPOSITORY = "kernels-ext-npu/RMSNorm"
pytestmark = pytest.mark.usefixtures("online")

FAULTS = [  # what goes wrong, whether the commit is made all the same, and what the client says
    ("refuse", {}, False, httpx2.ReadError),
    ("cut", {}, False, httpx2.RemoteProtocolError),
    ("lose", {}, True, httpx2.RemoteProtocolError),
    ("truncate", {"size": 10}, True, httpx2.RemoteProtocolError),
    ("truncate", {"size": 10_000}, True, httpx2.RemoteProtocolError),
    ("status", {"status": 500, "applied": True}, True, HfHubHTTPError),
    *(("status", {"status": status}, False, HfHubHTTPError) for status in (412, 503)),
]


@pytest.mark.parametrize(("kind", "fields", "is_made", "error"), FAULTS)
def test_a_fault_comes_before_the_effect_or_behind_it(localhub, kind, fields, is_made, error) -> None:
    """And to the second request that it matches alone."""
    localhub.faults.add(kind, method="POST", path="*/commit/main", at=2, **fields)
    repository = localhub.create(REPOSITORY)

    def commit(content: bytes) -> str:
        operations = [CommitOperationAdd("a.py", content)]
        return HfApi(localhub.url).create_commit(REPOSITORY, operations, commit_message="one", repo_type="kernel").oid

    assert commit(b"1") == repository.commit().id
    with pytest.raises(error) as caught:
        commit(b"2")
    hit = localhub.requests[-1]
    assert (hit.fault, repository.commit().number) == (kind, 3 if is_made else 2)
    if kind == "status":
        assert caught.value.response.status_code == hit.status == fields["status"]
    assert commit(b"3") == repository.commit().id
    assert repository.files()["a.py"] == b"3"
