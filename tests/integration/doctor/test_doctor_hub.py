"""What doctor says of the Hub, and that it tells no secret: real clients against a Hub on loopback."""

from pathlib import Path

import pytest

from kernels_ext_npu.catalogue import REPOSITORIES, in_words
from kernels_ext_npu.doctor import examination
from kernels_ext_npu.doctor.checks import hub_access
from kernels_ext_npu.doctor.findings import Finding, Verdict
from kernels_ext_npu.machine.privacy import hide
from tests.integration.doctor import doctor_faults as faults
from tests.localhub import LocalHub


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def ask(monkeypatch, **environment: str) -> list[Finding]:
    """The Hub, its publisher, and the Hub once more for who wants the kernels from there."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    seen = faults.observed(hub=examination._ask_hub())
    findings = [hub_access.reachable(seen), hub_access.publisher(seen)]
    seen.source = "hub"
    return [*findings, hub_access.reachable(seen)]


def test_a_hub_that_answers(monkeypatch, localhub: LocalHub, tmp_path: Path) -> None:
    environment = localhub.environment(tmp_path / "home") | {"HF_HUB_DISABLE_TELEMETRY": "0"}
    empty, _, asked = ask(monkeypatch, **environment)
    assert f"answers, but has no version 1 of the {in_words()} kernels" in empty.summary
    assert (empty.verdict, asked.verdict) == (Verdict.WARNING, Verdict.PROBLEM)
    for name in REPOSITORIES:
        localhub.publish(f"kernels-ext-npu/{name}", {})
    hub, publisher, _ = ask(monkeypatch)
    assert (hub.verdict, publisher.verdict) == (Verdict.OK, Verdict.WARNING)
    assert publisher.summary == "kernels-ext-npu is not trusted by the Hub"
    assert f'trust_remote_code=["kernels-ext-npu/{REPOSITORIES[0]}"]' in str(publisher.advice)
    localhub.faults.add("status", path="*/overview", status=404)
    _, publisher, _ = ask(monkeypatch)
    assert (publisher.verdict, publisher.see) == (Verdict.WARNING, "could not verify publisher trust status")
    _, _, quiet = ask(monkeypatch, DO_NOT_TRACK="1")
    assert "kernels cannot ask it: LocalProtocolError: Illegal header value" in quiet.summary
    assert quiet.commands == ("unset HF_HUB_DISABLE_TELEMETRY DISABLE_TELEMETRY DO_NOT_TRACK",)
    monkeypatch.delenv("DO_NOT_TRACK")
    localhub.faults.add("status", status=401, times=99)
    _, _, refused = ask(monkeypatch)
    assert "refuses the token: 401" in refused.summary
    assert "unset HF_TOKEN" in refused.commands
    localhub.faults.clear()
    localhub.faults.add("status", status=503, times=99)
    assert "answers 503: it is overloaded or down" in ask(monkeypatch)[0].summary


def test_a_hub_that_does_not_answer(monkeypatch, localhub: LocalHub, tmp_path: Path) -> None:
    monkeypatch.setattr(examination, "HUB_TIMEOUT", 0.5)
    localhub.faults.add("delay", seconds=60, times=99)
    late, publisher, asked = ask(monkeypatch, **localhub.environment(tmp_path / "home"))
    assert {request.status for request in localhub.requests} == {None}  # nobody waited for an answer
    assert late.summary == f"{localhub.url} does not answer in time"
    assert (late.verdict, publisher.verdict, asked.verdict) == (Verdict.WARNING, Verdict.NOT_CHECKED, Verdict.PROBLEM)
    dead, _, _ = ask(monkeypatch, HF_ENDPOINT="http://127.0.0.1:9")
    assert dead.summary == "http://127.0.0.1:9 cannot be reached: ConnectError: [Errno 111] Connection refused"
    assert any("HF_HUB_OFFLINE=1" in command for command in dead.commands)
    offline, publisher, asked = ask(monkeypatch, HF_HUB_OFFLINE="1")
    assert {offline.verdict, publisher.verdict, asked.verdict} == {Verdict.NOT_CHECKED}


def test_a_proxy_that_is_no_url_is_named_without_its_password(monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    finding, _, _ = ask(monkeypatch, HTTPS_PROXY="http://me:sec/ret@127.0.0.1:9")
    assert finding.summary == "HTTPS_PROXY: not a URL that can be used"
    assert examination._ask_hub().failure == "not asked"  # the client would tell the password
    assert "sec" not in str(finding.facts) + str(finding.summary)


def test_secrets_are_hidden_wherever_they_stand(monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "plain-words")
    monkeypatch.setenv("https_proxy", "http://me:p%40ssword@proxy:3128")
    shown = str(hide({"a": ["token plain-words", {"x": "http://me:p%40ssword@proxy"}], "b": ("p@ssword", 1, None)}))
    assert "plain-words" not in shown
    assert "ssword" not in shown
    assert hide("https://user:pw@host/x?token=abc hf_abcdefgh") == "https://***@host/x?token=*** ***"
    assert hide("TOKENIZERS_PARALLELISM=false at 8.5.0") == "TOKENIZERS_PARALLELISM=false at 8.5.0"
