"""Fit the rates of the estimate of time to what others measured, and say how far it is off: ``make estimate``.

With ``--report times.json``, of ``kernels-ext-npu benchmark`` on a card, it turns that into rows of
``tests/data/measured.json``, and says where the estimate is off.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import softnpu  # noqa: F401  before torch

# isort: split
import typer
from estimating import fitting, reports, rows, steps

from kernels_ext_npu.measuring.estimate import RATES

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    report: Annotated[Path | None, typer.Option(help="Add the times of this report of a benchmark.")] = None,
) -> None:
    """Print the rates that fit, those that are set, and how far the estimate is off from the rows that were not fitted.

    Rates are set in ``measuring/estimate.py`` by hand.
    """
    data = rows.read()
    if report is not None:
        added = reports.add(data, report)
        typer.echo(f"{len(added)} rows of {report}, the furthest off first:")
        for row in sorted(added, key=lambda row: -abs(fitting.off(row))):
            typer.echo(f"{fitting.off(row):+7.0%}  {1e3 * row.seconds:10.3f} ms  {row.name}, {row.mode}")
        return
    modules, _ = rows.module_rows(data)
    apart = rows.apart_rows(data)
    fitted = fitting.fit_all(modules, apart)
    for name, value in vars(fitted).items():
        said = "" if getattr(RATES, name) == value else f"  (set: {getattr(RATES, name):g})"
        typer.echo(f"{name:18}{value:10g}{said}")
    _, tested = rows.halves(modules)
    for size, some in fitting.by_size(tested).items():
        _say(f"modules {size}", some)
    typer.echo(f"nine of ten are within a factor of {fitting.spread(tested):.2f}")
    for what, some in apart.items():
        _say(what, rows.halves(some)[1])
    _say("products", rows.product_rows(data))
    for step in map(steps.rebuild, data["steps"]):
        typer.echo(f"{step.off:+7.0%}  {1e3 * step.published:10.3f} ms  {step.name}")
    if data["reports"]:
        _say("reports", rows.report_rows(data))


def _say(what: str, some: list[rows.Row]) -> None:
    found = fitting.summary(some)
    typer.echo(
        f"{what}: {found.rows} rows, off by {found.mean:.1%} in the mean, nine of ten by at most {found.most:.1%}"
    )


if __name__ == "__main__":
    app()
