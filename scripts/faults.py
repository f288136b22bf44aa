"""Plant faults of one per cent, and say which test sees which: that is ``make test-faults``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from planting.faults import FAULTS
from planting.seeing import Copy

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    names: Annotated[
        list[str] | None, typer.Argument(help="Faults with this in their name, such as RMSNorm; all by default.")
    ] = None,
) -> None:
    """Plant one fault after the other in a copy of this clone, and run the tests of its repository until one fails.

    Ends with 0 if every fault was seen, with 1 if one was not.
    """
    chosen = [fault for fault in FAULTS if not names or any(name.lower() in fault.name.lower() for name in names)]
    unseen = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(__file__).resolve().parent.parent, Path(folder))
        for fault in chosen:
            test = copy.seen(fault)
            unseen += test is None
            typer.echo(f"{fault.name}: {test or 'SEEN BY NO TEST'}")
    typer.echo(f"{len(chosen) - unseen} of {len(chosen)} faults were seen")
    raise typer.Exit(1 if unseen or not chosen else 0)


if __name__ == "__main__":
    app()
