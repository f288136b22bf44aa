"""Plant faults of one per cent, and say which test sees which: that is ``make test-faults``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from planting.faults import FAULTS
from planting.record import PAGE, page
from planting.seeing import Copy

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    names: Annotated[
        list[str] | None, typer.Argument(help="Faults with this in their name, such as RMSNorm; all by default.")
    ] = None,
    recorded: Annotated[bool, typer.Option("--record", help=f"Write {PAGE}: which test saw which.")] = False,
) -> None:
    """Plant one fault after the other in a copy of this clone, and run the tests of its repository until one fails.

    Ends with 0 if every fault was seen, with 1 if one was not.
    """
    if recorded and names:
        raise typer.BadParameter("--record is of all faults")
    chosen = [fault for fault in FAULTS if not names or any(name.lower() in fault.name.lower() for name in names)]
    root, seen = Path(__file__).resolve().parent.parent, {}
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(root, Path(folder))
        for fault in chosen:
            test = copy.seen(fault)
            typer.echo(f"{fault.name}: {test or 'SEEN BY NO TEST'}")
            if test is not None:
                seen[fault.name] = test
    typer.echo(f"{len(seen)} of {len(chosen)} faults were seen")
    if len(seen) < len(chosen) or not chosen:
        raise typer.Exit(1)
    if recorded:
        (root / PAGE).write_text(page(seen), "utf-8")


if __name__ == "__main__":
    app()
