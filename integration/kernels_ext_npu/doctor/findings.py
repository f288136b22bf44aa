"""What doctor says: one finding a check, each with a verdict and with what to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import partial
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
        verdict: how it ended.
        summary: what was found, in a line or two; of a check that was not made, why.
        details: more lines of it.
        advice: what to do, in words; None if there is nothing to do.
        commands: what to do, to be copied into a shell.
        see: the heading in docs/troubleshooting.md that tells more, None if there is none.
        facts: the same for programs; part of the JSON report only.
        check: what was checked; that is the check's name where it makes one finding.
    """

    verdict: Verdict
    summary: str
    details: tuple[str, ...] = ()
    advice: str | None = None
    commands: tuple[str, ...] = ()
    see: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    check: str = ""


ok = partial(Finding, Verdict.OK)
warning = partial(Finding, Verdict.WARNING)
problem = partial(Finding, Verdict.PROBLEM)
not_checked = partial(Finding, Verdict.NOT_CHECKED)
