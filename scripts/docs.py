"""Write the generated parts of the documents anew: ``python scripts/docs.py``, which is ``make docs``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import transformers
import typer

from documents import DocumentError, generated, peak_memory, rent, savings
from kernels_ext_npu.matching.classification import COUNTED

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    all_rent: Annotated[
        bool, typer.Option("--rent", help="Count all mechanisms anew, also where nothing changed.")
    ] = False,
) -> None:
    """Write what is generated in the documents of this clone, and name the files that changed; draw the pictures.

    With the newest release of transformers that is what of it is served, and with another one all the rest.
    """
    root = Path(__file__).resolve().parent.parent
    if is_newest := transformers.__version__ == COUNTED:
        typer.echo(f"what is served of transformers {COUNTED}:")
    else:
        rent.record(all_rent)
    try:
        stale = generated.stale(root)
    except DocumentError as error:
        typer.echo(f"docs: {error}", err=True)
        raise typer.Exit(2) from error
    for path, content in stale.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        typer.echo(f"wrote {path.relative_to(root)}")
    if not stale:
        typer.echo("nothing changed")
    if not is_newest:
        savings.draw(root)
        peak_memory.draw(root)


if __name__ == "__main__":
    app()
