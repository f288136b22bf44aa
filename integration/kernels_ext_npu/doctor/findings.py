"""What doctor says: one finding a check, each with a verdict and with what to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any


class Verdict(str, Enum):
    """How a check ended. Only a problem makes a machine unhealthy."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    Attributes:
        check: what was checked.
        verdict: how it ended.
        summary: what was found, in a line or two.
        details: more lines of it.
        advice: what to do, in words; None if there is nothing to do.
        commands: what to do, to be copied into a shell.
        see: the heading in docs/troubleshooting.md that tells more, None if there is none.
        facts: the same for programs; part of the JSON report only.
    """

    check: str
    verdict: Verdict
    summary: str
    details: tuple[str, ...] = ()
    advice: str | None = None
    commands: tuple[str, ...] = ()
    see: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def asks(self) -> bool:
        """Whether the user has something to do."""
        return self.verdict in (Verdict.PROBLEM, Verdict.WARNING)


@dataclass(frozen=True)
class Diagnosis:
    """All findings of a machine, in the order in which they are best read."""

    version: str
    source: str
    findings: list[Finding]

    @property
    def healthy(self) -> bool:
        """Whether there is no problem; warnings are none."""
        return not any(finding.verdict is Verdict.PROBLEM for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis as JSON has it: version, source, healthy, and a dictionary for each check."""
        checks = [asdict(finding) | {"verdict": finding.verdict.value} for finding in self.findings]
        return {"version": self.version, "source": self.source, "healthy": self.healthy, "checks": checks}


def ok(check: str, summary: str, **more: Any) -> Finding:
    """Make the finding of a check that found nothing wrong."""
    return Finding(check, Verdict.OK, summary, **more)


def warning(check: str, summary: str, **more: Any) -> Finding:
    """Make the finding of a check that found what may matter."""
    return Finding(check, Verdict.WARNING, summary, **more)


def problem(check: str, summary: str, **more: Any) -> Finding:
    """Make the finding of a check that found what has to be mended."""
    return Finding(check, Verdict.PROBLEM, summary, **more)


def not_checked(check: str, summary: str, **more: Any) -> Finding:
    """Make the finding of a check that could not be made; the summary says why."""
    return Finding(check, Verdict.NOT_CHECKED, summary, **more)
