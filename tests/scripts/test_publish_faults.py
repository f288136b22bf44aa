"""Every request of a publish fails once, in every way: a branch holds the old state or the new one, nothing else.

The points and outcomes are printed: `pytest -s`.
"""

from collections import Counter
from collections.abc import Callable

import pytest

from publishing.remote import Patience
from tests.localhub import LocalHub
from tests.support.tiny import REPO, held

OTHER = "build/torch-cpu/__init__.py"
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


class State:
    """What a repository holds, and whether it is one of the two states that it may be in."""

    def __init__(self, hub: LocalHub) -> None:
        exists = ("kernels", REPO) in hub.store.repositories
        self.version = held(hub, "v1") if exists else None
        self.card = held(hub, "main").get("README.md") if exists else None
        self.branches = set(hub.store.get("kernels", REPO).refs()["branches"]) if exists else set()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, State) and (self.version, self.card) == (other.version, other.card)

    __hash__ = None  # type: ignore[assignment]


@pytest.fixture
def scenario(request: pytest.FixtureRequest, publisher, clone, localhub):
    """Makes the Hub as it is before a publish, and gives the publish and the two states."""
    clone.write("torch-ext/tiny/__init__.py", "")
    (clone.source / "layers.py").unlink()
    clone.rebuild()
    update = request.param == "beside others"

    def prepare() -> None:
        if ("kernels", REPO) in localhub.store.repositories:
            localhub.store.delete("kernels", REPO)
        localhub.faults.clear()
        if update:
            old = {OTHER: b"of others", "build/torch-npu/old.py": b"old", "build/torch-npu/__init__.py": b"before"}
            localhub.publish(REPO, old)

    return prepare, lambda **fields: publisher("torch-npu", **fields)


SCENARIOS = pytest.mark.parametrize("scenario", ["empty hub", "beside others"], indirect=True)


@pytest.mark.parametrize("scenario", ["beside others"], indirect=True)
def test_every_request_may_fail(scenario, localhub, capsys) -> None:
    """The ways to fail take turns."""
    kinds = list(KINDS)
    fail_each(scenario, localhub, capsys, "in turn", lambda at: kinds[at % len(kinds)])


@pytest.mark.long
@SCENARIOS
@pytest.mark.parametrize("kind", KINDS)
def test_every_request_may_fail_in_every_way(scenario, localhub, capsys, kind: str) -> None:
    fail_each(scenario, localhub, capsys, kind, lambda at: kind)


def fail_each(scenario, localhub, capsys, title: str, kind_of: Callable[[int], str]) -> None:
    prepare, publish = scenario
    prepare()
    before, start = State(localhub), len(localhub.faults.requests)
    assert publish().status == "published"
    after, requests = State(localhub), len(localhub.faults.requests) - start
    outcomes: Counter[str] = Counter()
    for at in range(1, requests + 1):
        prepare()
        kind = kind_of(at)
        point = f"request {at} of {requests}, {kind}"
        for offset, fault in enumerate(KINDS[kind]):
            localhub.faults.add(**{"at": at + offset} | fault)
        report = publish(patience=Patience(failures=1 if kind in FOREVER else 4, seconds=0))
        localhub.faults.clear()
        state = State(localhub)
        assert state.version in (before.version, after.version), f"{point}: half a branch"
        assert state.card in (before.card, after.card), point
        assert before.version is None or state.version[OTHER] == b"of others", point
        assert (report.exit_code, state == after) in ((0, True), (2, True), (2, False)), f"{point}: {report.reasons}"
        held_state = "new" if state == after else "old" if state == before else "build new, card old"
        outcomes[f"{report.status}, {held_state}"] += 1
        if report.exit_code or state.branches != {"main", "v1"}:
            report = publish()
            assert report.exit_code == 0, f"{point}: the next run ends with {report.reasons}"
            assert State(localhub) == after, point
            assert State(localhub).branches == {"main", "v1"}, f"{point}: something is left over"
    with capsys.disabled():
        print(f"\n{title}: {requests} points, {dict(outcomes)}")
