"""``kernels-ext-npu coverage``: what of the installed transformers has a kernel, and why the rest has none."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kernels_ext_npu.coverage.model_types import Folder


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
        raise _refusal("--markdown is about all model types, and no JSON: give it alone")
    try:
        import softnpu  # noqa: F401  before torch; changes nothing where there is an NPU
    except ImportError as error:  # without torch_npu it is not needed
        if importlib.util.find_spec("torch_npu") is not None:
            raise _refusal(error) from error
    from rich.console import Console

    from kernels_ext_npu.coverage import tables
    from kernels_ext_npu.coverage.markdown import page
    from kernels_ext_npu.coverage.model_types import UnknownModelTypeError, find
    from kernels_ext_npu.coverage.survey import survey

    try:
        folders = find(model_types) if model_types else None
    except UnknownModelTypeError as error:
        raise _refusal(error) from error
    rows = survey(folders, _bar)
    if as_json:
        typer.echo(json.dumps(tables.to_json(rows), indent=2))
    elif markdown:
        typer.echo(page(rows), nl=False)
    else:
        show = tables.detailed if model_types else tables.whole
        Console().print(show(rows))


def _bar(folders: Sequence[Folder]) -> Iterable[Folder]:
    """A progress bar where somebody looks at it, which is gone in the end."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(folders, "reading transformers", console=console, transient=True, disable=not sys.stderr.isatty())


def _refusal(error: object) -> typer.Exit:
    typer.echo(f"kernels-ext-npu: {error}", err=True)
    return typer.Exit(2)
