"""Publishing to a Hub on loopback: what is there afterwards, what is left alone, and what is said."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from huggingface_hub import HfApi

from publishing.remote import Patience
from tests.localhub import LocalHub
from tests.support.tiny import REPO, STRICT, Clone, held

NEW = "torch27-cxx11-cann82-aarch64-linux"


def commits(hub: LocalHub, branch: str) -> int:
    return hub.repository(REPO).commit(branch).number


def test_an_empty_hub_gets_the_build_and_the_card_in_one_commit_each_and_once(publisher, localhub, clone) -> None:
    report = publisher()
    assert (report.status, report.exit_code) == ("published", 0)
    assert held(localhub, "v1") == clone.built()
    assert held(localhub, "main")["README.md"] == (clone.repository / "README.md").read_bytes()
    assert localhub.repository(REPO).branches.keys() == {"main", "v1"}
    assert report.branches["v1"]["commit"] == localhub.repository(REPO).commit("v1").id
    assert report.branches["v1"]["checked"] == len(clone.built())
    report = publisher()
    assert (report.status, report.exit_code) == ("nothing to do", 0)
    assert commits(localhub, "v1") == commits(localhub, "main") == 2  # the first is the Hub's own
    assert not any(entry["committed"] for entry in report.branches.values())


def test_a_new_strict_variant_goes_beside_the_others(publisher, localhub, clone) -> None:
    publisher()
    before = held(localhub, "v1")
    clone.write("torch-ext/tiny/layers.py", (clone.source / "layers.py").read_text() + "\n# newer\n")
    clone.rebuild(STRICT, NEW)
    report = publisher(NEW)
    added = {path: content for path, content in clone.built().items() if path.startswith(f"build/{NEW}/")}
    assert held(localhub, "v1") == before | added
    assert report.branches["v1"]["added"] == sorted(added)
    assert report.branches["v1"]["left"] == sorted(before)
    assert commits(localhub, "v1") == 3


def test_a_changed_variant_loses_the_files_that_it_no_longer_has(publisher, localhub, clone) -> None:
    clone.write("torch-ext/tiny/old.py", "")
    clone.rebuild(STRICT)
    publisher()
    (clone.source / "old.py").unlink()
    clone.rebuild(STRICT)
    report = publisher()
    assert held(localhub, "v1") == clone.built()
    assert [path for path in report.branches["v1"]["removed"] if STRICT in path] == [f"build/{STRICT}/old.py"]
    assert f"build/{STRICT}/metadata.json" in report.branches["v1"]["changed"]


def test_a_variant_goes_only_when_it_is_named(publisher, localhub, clone) -> None:
    publisher()
    clone.rebuild()
    assert publisher().status == "nothing to do"
    assert any(STRICT in path for path in held(localhub, "v1"))
    report = publisher(pruned=(STRICT,))
    assert held(localhub, "v1") == clone.built()
    assert all(STRICT in path for path in report.branches["v1"]["removed"])
    assert publisher(pruned=(STRICT,)).status == "nothing to do"


def test_version_2_stands_beside_version_1_without_what_main_or_v1_hold(publisher, localhub, clone) -> None:
    publisher()
    first = held(localhub, "v1")
    localhub.publish(REPO, {"build/torch-cpu/__init__.py": b"stale"}, "main")
    clone.write("build.toml", clone.build_toml(2))
    clone.rebuild(STRICT)
    assert publisher().status == "published"
    assert held(localhub, "v1") == first
    assert held(localhub, "v2") == clone.built()
    assert localhub.repository(REPO).branches.keys() == {"main", "v1", "v2"}
    assert "build/torch-cpu/__init__.py" in held(localhub, "main")


def test_a_dry_run_writes_nothing(publisher, localhub, clone) -> None:
    report = publisher(dry_run=True)
    assert (report.status, report.exit_code) == ("planned", 0)
    assert report.branches["v1"]["added"] == sorted(clone.built())
    assert not localhub.repositories
    publisher()
    clone.write("torch-ext/tiny/layers.py", "")
    clone.rebuild(STRICT)
    localhub.requests.clear()
    publisher(dry_run=True)
    assert {request.method for request in localhub.requests} == {"GET"}


def test_a_hub_that_changes_all_the_time_is_given_up_and_stays_as_it_is(publisher, localhub) -> None:
    publisher("torch-npu")
    before = held(localhub, "v1")
    localhub.faults.add("status", status=412, method="POST", path="*/commit/*", times=1000)
    report = publisher()
    assert (report.status, report.exit_code) == ("failed", 2)
    assert "412" in report.reasons[0]
    assert held(localhub, "v1") == before


def test_eight_publishers_at_once_lose_nothing(publisher, localhub, clone) -> None:
    names = [f"torch{minor}-cxx11-cann8{cann}-aarch64-linux" for minor in (26, 27, 28, 29) for cann in (2, 5)]
    clone.rebuild(*names)
    with ThreadPoolExecutor(8) as pool:
        reports = list(pool.map(lambda name: publisher(name, patience=Patience(seconds=0.02)), names))
    assert [report.reasons for report in reports] == [[]] * 8
    assert [report.exit_code for report in reports] == [0] * 8
    assert held(localhub, "v1") == {p: c for p, c in clone.built().items() if p.split("/")[1] in names}
    assert localhub.repository(REPO).branches.keys() == {"main", "v1"}


def test_pull_requests_leave_the_branches_alone_and_are_not_opened_twice(publisher, localhub, clone) -> None:
    publisher("torch-npu")
    before = dict(localhub.repository(REPO).branches)
    clone.write("README.md", (clone.repository / "README.md").read_text() + "\nMore.\n")
    report = publisher(create_pr=True)
    assert report.status == "published"
    assert report.branches["v1"]["pull_request"].endswith("/discussions/1")
    again = publisher(create_pr=True)
    assert localhub.repository(REPO).pulls.keys() == {"refs/pr/1", "refs/pr/2"}
    assert localhub.repository(REPO).branches == before
    assert again.branches["v1"]["commit"] == report.branches["v1"]["commit"]


def test_a_pull_request_needs_the_branch(publisher, localhub) -> None:
    report = publisher(create_pr=True)
    assert (report.status, report.exit_code) == ("refused", 1)
    assert "no branch v1" in report.reasons[0]
    assert not localhub.repositories


def test_without_access_it_says_how_to_get_it(publisher, localhub) -> None:
    localhub.faults.add("status", status=403, path="/api/repos/create")
    report = publisher()
    assert (report.status, report.exit_code) == ("failed", 2)
    assert "https://huggingface.co/settings/account" in report.reasons[0]


def test_what_arrives_changed_is_found(publisher, localhub, clone: Clone) -> None:
    """A server that keeps something else than it was sent."""
    commit = HfApi.create_commit

    def garbled(self, repo_id, operations, **kwargs):
        for operation in operations:
            if operation.path_in_repo.endswith("torch-npu/layers.py"):
                operation.__init__(operation.path_in_repo, b"garbled")
        return commit(self, repo_id, operations, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HfApi, "create_commit", garbled)
        report = publisher()
    assert (report.status, report.exit_code) == ("failed", 2)
    assert "build/torch-npu/layers.py: another content" in report.reasons[0]
    assert publisher().status == "published"
    assert held(localhub, "v1") == clone.built()
