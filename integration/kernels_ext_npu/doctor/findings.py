"""What doctor says: one finding a check, each with a verdict and with what to do.

Errors that users of torch_npu, kernels and transformers meet are known, with what they mean, and what to do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

LOOK = "Look at the error."
NO_CANN = "libhccl.so: cannot open shared object file"
# name of a module -> name of its package
PACKAGES = {"yaml": "pyyaml", "torch_npu": "--no-deps torch_npu", "PIL": "pillow", "attr": "attrs"}


class Verdict(str, Enum):
    """How a check ended. Only a problem makes a machine unhealthy."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True)
class Finding:
    """The result of a check."""

    verdict: Verdict  # how it ended
    summary: str  # what was found, in a line or two; of a check that was not made, why
    details: tuple[str, ...] = ()  # more lines of it
    advice: str | None = None  # what to do, in words; None if there is nothing to do
    commands: tuple[str, ...] = ()  # what to do, to be copied into a shell
    see: str | None = None  # the heading in docs/troubleshooting.md that tells more, None if there is none
    facts: dict[str, Any] = field(default_factory=dict)  # the same for programs; part of the JSON report only
    check: str = ""  # what was checked; that is the check's name where it makes one finding


ok = partial(Finding, Verdict.OK)
warning = partial(Finding, Verdict.WARNING)
problem = partial(Finding, Verdict.PROBLEM)
not_checked = partial(Finding, Verdict.NOT_CHECKED)


class Known(NamedTuple):
    """An error that is known: how it is recognised, what it means, and what to do."""

    regex: str  # finds it in the text of an exception
    meaning: str  # why it happens
    advice: str  # what to do
    commands: list[str] | tuple[str, ...] = ()  # what to do, for a shell
    see: str | None = None  # the heading in docs/troubleshooting.md
    source: str | None = None  # where the message is written, if that is hard to find


def _read(name: str) -> Any:
    return json.loads(Path(__file__).with_name(name).read_text("utf-8"))


KNOWN = [Known(**entry) for entry in _read("known_errors.json")]
REMEDIES: dict[str, dict[str, Any]] = _read("remedies.json")


def remedy(case: str, *commands: str, **values: object) -> dict[str, Any]:
    """Return what to do in a case of remedies.json: advice and commands, and where to read more if that is known.

    Args:
        commands: those for this machine, in place of the ones that are written there.
        values: what stands in the place of {names} there.
    """
    found = REMEDIES[case]
    written = tuple(line.format(**values) for line in found.get("commands", ()))
    return found | {"advice": found["advice"].format(**values), "commands": commands or written}


def explain(errors: Iterable[str]) -> Known | None:
    """Find what is known of an error, given with those that caused it; None if nothing is."""
    for error in reversed([*errors]):  # the cause says more than what was made of it
        if match := re.match(r"ModuleNotFoundError: No module named '([\w.]+)'", error):
            module = match[1].partition(".")[0]
            install = f"pip install {PACKAGES.get(module, module)}"
            return Known("", f"the package of the module {match[1]} is missing", "Install it.", (install,))
        for known in KNOWN:
            if re.search(known.regex, error):
                return known
    return None


def explained(errors: tuple[str, ...], otherwise: str = LOOK, commands: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return what a finding says of an error, with its causes, or otherwise: details, advice, commands, and more."""
    known = explain(errors) or Known("", "", otherwise)
    return {
        "details": (known.meaning,) if known.meaning else (),
        "advice": known.advice,
        "commands": tuple(known.commands) or commands,
        "see": known.see,
    }
