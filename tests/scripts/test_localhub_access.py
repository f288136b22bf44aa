"""The Hub of the tests: who may read, write and create, and that no token is kept."""

import json

import pytest
from huggingface_hub.errors import HfHubHTTPError

from tests.localhub import LocalHub
from tests.localhub.client import TOKEN, Client


def test_a_token_can_be_required(localhub: LocalHub, client: Client) -> None:
    localhub.settings.token = "another"
    with pytest.raises(HfHubHTTPError, match="Invalid credentials"):
        client.paths()
    anonymous = Client(localhub.url, token=False)
    assert anonymous.paths() == [".gitattributes"]
    with pytest.raises(HfHubHTTPError) as caught:
        anonymous.create_branch(branch="v1")
    assert caught.value.response.status_code == 401
    localhub.settings.token = TOKEN
    client.create_branch(branch="v1")
    assert client.api.whoami()["name"] == "tester"


def test_creating_repositories_can_be_refused(localhub: LocalHub, client: Client) -> None:
    localhub.settings.may_create = False
    with pytest.raises(HfHubHTTPError, match="You don't have the rights"):
        client.api.create_repo("kernels-ext-npu/RoPE", repo_type="kernel")
    client.create_repo(exist_ok=True)


def test_no_token_is_written_down(localhub: LocalHub, client: Client) -> None:
    client.commit({"a.py": b"1"})
    assert all(request.authorized for request in localhub.requests)
    assert TOKEN not in json.dumps([vars(request) for request in localhub.requests])
    for path in localhub.root.rglob("*"):
        assert path.is_dir() or TOKEN.encode() not in path.read_bytes()
