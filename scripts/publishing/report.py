"""Report what a run did: as a table for people, as JSON for programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from publishing.apply import Applied
from publishing.plan import Plan
from publishing.remote import redact

KINDS = ("added", "changed", "removed", "left")
EXIT_CODES = {"published": 0, "nothing to do": 0, "planned": 0, "refused": 1, "failed": 2}


@dataclass
class Report:
    """Hold how a run ended: `status` is one of `EXIT_CODES`; `reasons` say why it was refused or failed."""

    repository: str
    repo_id: str | None
    version: int | None
    status: str = "failed"
    reasons: list[str] = field(default_factory=list)
    branches: dict[str, dict[str, Any]] = field(default_factory=dict)
    loaded: dict[str, Any] | None = None

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.status]

    def planned(self, plan: Plan) -> None:
        self.branches[plan.branch] = plan.to_json() | {"commit": None, "pull_request": None, "checked": None}

    def applied(self, applied: Applied) -> None:
        entry = applied.first.to_json() | {"commit": applied.commit, "committed": applied.committed}
        self.branches[applied.first.branch] = entry | {"pull_request": applied.pull_request, "checked": None}

    def ended(self, status: str, *reasons: str) -> Report:
        self.status, self.reasons = status, [redact(reason) for reason in reasons]
        return self

    def to_json(self) -> dict[str, Any]:
        names = ("repository", "repo_id", "version", "status", "reasons", "branches", "loaded")
        return {name: getattr(self, name) for name in names}


def show_plan(console: Console, repo_id: str, plans: list[Plan]) -> None:
    """Print a row for each variant, the card, and whatever else there is on a branch."""
    table = Table("branch", title=repo_id, title_justify="left")
    table.add_column("part", overflow="fold")
    for kind in KINDS:
        table.add_column(kind)
    for plan in plans:
        where = plan.branch + ("" if plan.exists else " (new)")
        for part, counts in sorted(_parts(plan).items()):
            table.add_row(where, part, *(_cell(counts[kind]) for kind in KINDS))
            where = ""
    console.print(table)


def _parts(plan: Plan) -> dict[str, dict[str, list[str]]]:
    parts: dict[str, dict[str, list[str]]] = {}
    for kind in ("added", "changed", "removed", "unchanged", "left"):
        for path in getattr(plan, kind):
            folder, _, rest = path.partition("/")
            variant, _, file = rest.partition("/")
            part, name = (variant, file) if folder == "build" and file else (path, path)
            empty: dict[str, list[str]] = {"added": [], "changed": [], "removed": [], "left": []}
            parts.setdefault(part, empty)["left" if kind == "unchanged" else kind].append(name)
    return parts


def _cell(names: list[str]) -> str:
    if len(names) <= 3 and names:
        return escape("\n".join(names))
    return f"{len(names)} files" if names else ""


def show_end(console: Console, report: Report) -> None:
    """Print what was done, or why not."""
    for branch, entry in report.branches.items():
        if entry["commit"] is not None:
            done = entry["pull_request"] or ("published" if entry["committed"] else "as it was")
            checked = f", {entry['checked']} files read again" if entry["checked"] is not None else ""
            console.print(f"{branch}: {done} at {entry['commit']}{checked}", highlight=False, soft_wrap=True)
    if report.loaded is not None:
        _show_loaded(console, report)
    color = "green" if report.exit_code == 0 else "red"
    console.print(f"[{color}]{report.repo_id or report.repository}: {report.status}", highlight=False, soft_wrap=True)
    for reason in report.reasons:
        console.print(f"  {reason}", highlight=False, markup=False, soft_wrap=True)


def _show_loaded(console: Console, report: Report) -> None:
    loaded = report.loaded or {}
    if "none" in loaded:
        line = "no variant on the branch fits this machine: nothing was loaded"
    else:
        line = f"loaded {loaded['variant']}" + (" and ran it" if loaded["ran"] else "; there is no example to run")
    console.print(f"{line}, in a fresh process with an empty cache", highlight=False, soft_wrap=True)
    if loaded.get("refusal"):
        console.print(loaded["refusal"], highlight=False, markup=False, soft_wrap=True)
