"""Every request of a publish fails once, in every way: a branch holds the old state or the new one, nothing else."""

from collections.abc import Callable
from typing import NamedTuple

import pytest

from publishing.remote import Patience
from tests.localhub import LocalHub
from tests.support.tiny import REPO, held

OTHER = "build/torch-cpu/__init__.py"
OLD = {OTHER: b"of others", "build/torch-npu/old.py": b"old", "build/torch-npu/__init__.py": b"before"}
ONCE = {  # how a request fails: as faults of the Hub, from that request on
    "cut before": [{"kind": "cut"}],
    "cut after": [{"kind": "lose"}],
    "refused": [{"kind": "refuse"}],
    "answer cut off": [{"kind": "truncate", "size": 20}],
    "409": [{"kind": "status", "status": 409}],
    "412": [{"kind": "status", "status": 412}],
    "429": [{"kind": "status", "status": 429}],
    "500": [{"kind": "status", "status": 500}],
    "503": [{"kind": "status", "status": 503}],
    "500 after": [{"kind": "status", "status": 500, "applied": True}],
}
FOREVER = {  # and nothing answers any more
    "dead from here": [{"kind": "cut", "times": 10**6}],
    "dead after this": [{"kind": "lose"}, {"kind": "cut", "times": 10**6}],
}
KINDS = ONCE | FOREVER


class State(NamedTuple):
    """What a repository holds: its branches, the files of the version, and the card."""

    branches: set[str]
    version: dict[str, bytes] | None
    card: bytes | None


def repository_state(hub: LocalHub) -> State:
    if ("kernels", REPO) not in hub.repositories:
        return State(set(), None, None)
    repository = hub.repository(REPO)
    return State(set(repository.branches), held(hub, "v1"), repository.files().get("README.md"))


@pytest.fixture
def fail_each(publisher, clone, localhub) -> Callable[..., None]:
    """Publishes to a Hub that holds some files of a version, once for each request, which fails."""
    clone.write("torch-ext/tiny/__init__.py", "")
    (clone.source / "layers.py").unlink()
    clone.rebuild()

    def prepare(old: dict[str, bytes]) -> None:
        localhub.repositories.clear()
        localhub.faults.clear()
        if old:
            localhub.publish(REPO, old)

    def run(old: dict[str, bytes], kind_at: Callable[[int], str]) -> None:
        prepare(old)
        before, start = repository_state(localhub), len(localhub.requests)
        assert publisher("torch-npu").status == "published"
        after, requests = repository_state(localhub), len(localhub.requests) - start
        assert after.branches == {"main", "v1"}
        for at in range(1, requests + 1):
            prepare(old)
            kind = kind_at(at)
            point = f"request {at} of {requests}, {kind}"
            for offset, fault in enumerate(KINDS[kind]):
                localhub.faults.add(**{"at": at + offset} | fault)
            report = publisher("torch-npu", patience=Patience(failures=1 if kind in FOREVER else 4, seconds=0))
            localhub.faults.clear()
            state = repository_state(localhub)
            assert state.version in (before.version, after.version), f"{point}: half a branch"
            assert state.card in (before.card, after.card), point
            assert not old or state.version[OTHER] == old[OTHER], point
            new = [state.version == after.version, state.card == after.card]
            assert report.exit_code == 2 or (report.exit_code, new) == (0, [True, True]), f"{point}: {report.reasons}"
            if report.exit_code or state != after:
                report = publisher("torch-npu")
                assert report.exit_code == 0, f"{point}: the next run ends with {report.reasons}"
                assert repository_state(localhub) == after, f"{point}: not as it is without a fault"

    return run


def test_every_request_may_fail(fail_each) -> None:
    """The ways to fail take turns."""
    kinds = list(KINDS)
    fail_each(OLD, lambda at: kinds[at % len(kinds)])


@pytest.mark.long
@pytest.mark.parametrize("old", [{}, OLD], ids=["empty hub", "beside others"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_request_may_fail_in_every_way(fail_each, kind: str, old: dict[str, bytes]) -> None:
    fail_each(old, lambda at: kind)
