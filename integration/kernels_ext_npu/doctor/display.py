"""Shows findings to people: a list, and what to do at its end, with commands that can be copied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red", "not checked": "dim"}


def show(console: Console, report: dict[str, Any]) -> None:
    """Print a report, as `examine` gives it."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in report["checks"]:
        found = Text(check["summary"])
        for detail in check["details"]:
            found.append(f"\n{detail}", style="dim")
        table.add_row(Text(check["verdict"], style=STYLES[check["verdict"]]), check["check"], found)
    console.print(table)
    console.print()
    asking = [check for check in report["checks"] if check["verdict"] in ("problem", "warning")]
    if asking:
        console.print("What to do\n", style="bold")
    for check in sorted(asking, key=lambda check: check["verdict"] != "problem"):
        title = Text(f"{check['verdict']}: ", style=STYLES[check["verdict"]])
        console.print(title.append(f"{check['check']}: {check['summary']}"))
        if check["advice"]:
            console.print(Text(check["advice"]), highlight=False)
        for line in check["commands"]:
            console.print(f"    {line}", soft_wrap=True, highlight=False, markup=False)
        if check["see"]:
            console.print(Text(f'More: {page()}, "{check["see"]}"', style="dim"), soft_wrap=True)
        console.print()
    console.print(Text(_verdict(report), style="bold green" if report["healthy"] else "bold red"))


def page() -> str:
    """Return where the page on errors is: inside the installed package, or in the clone that this is."""
    package = Path(__file__).parent.parent
    places = package / "troubleshooting.md", package.parent.parent / "docs" / "troubleshooting.md"
    return str(next((path for path in places if path.is_file()), "docs/troubleshooting.md"))


def _verdict(report: dict[str, Any]) -> str:
    counts = {kind: sum(check["verdict"] == kind for check in report["checks"]) for kind in ("problem", "warning")}
    if report["healthy"]:
        software = any(check["check"] == "device" and check["facts"].get("software") for check in report["checks"])
        what = "Healthy, on the software device" if software else "Healthy"
        return f"{what}: {_counted(counts['warning'], 'warning')}."
    return f"Not healthy: {_counted(counts['problem'], 'problem')}, {_counted(counts['warning'], 'warning')}."


def _counted(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"
