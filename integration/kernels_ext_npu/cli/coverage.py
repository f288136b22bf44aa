"""``kernels-ext-npu coverage``: what of the installed transformers has a kernel, and why the rest has none."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from kernels_ext_npu.cli.refusals import RefusedError, refusing, take_device

if TYPE_CHECKING:
    from kernels_ext_npu.coverage.model_types import Folder


@refusing()
def coverage(
    model_types: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL_TYPE", help="Such as qwen3: every class and function of it. Default: all."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="All of it on standard output, and nothing else there.")
    ] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="The page docs/coverage.md for this transformers.")
    ] = False,
) -> None:
    """Count what of the installed transformers has a kernel, for every model type, and why the rest has none.

    Ends with 2 if there is no such model type.
    """
    if markdown and (as_json or model_types):
        raise RefusedError("--markdown is about all model types, and no JSON: give it alone")
    take_device(needed=False)
    from rich.console import Console

    from kernels_ext_npu.coverage import tables
    from kernels_ext_npu.coverage.markdown import page
    from kernels_ext_npu.coverage.model_types import UnknownModelTypeError, find
    from kernels_ext_npu.coverage.survey import survey

    with refusing(UnknownModelTypeError):
        folders = find(model_types) if model_types else None
    rows = survey(folders, _bar)
    if as_json:
        typer.echo(json.dumps(tables.to_json(rows), indent=2))
    elif markdown:
        typer.echo(page(rows), nl=False)
    else:
        show = tables.detailed if model_types else tables.whole
        Console().print(show(rows))


def _bar(folders: Sequence[Folder]) -> Iterable[Folder]:
    """Show a progress bar where somebody looks at it, which is gone in the end."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(folders, "reading transformers", console=console, transient=True, disable=not sys.stderr.isatty())
