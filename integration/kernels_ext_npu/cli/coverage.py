"""``kernels-ext-npu coverage``: what of the installed transformers has a kernel, and why the rest has none."""

from __future__ import annotations

from typing import Annotated

import typer

from kernels_ext_npu.cli.terminal import AsJson, console, print_json, progress, take_device


def coverage(
    model_types: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL_TYPE", help="Such as qwen3: every class and function of it. Default: all."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Count what of the installed transformers has a kernel, for every model type, and why the rest has none.

    Ends with 2 if there is no such model type.
    """
    take_device(needed=False)
    from kernels_ext_npu.coverage import tables
    from kernels_ext_npu.coverage.survey import find, survey

    folders = find(model_types) if model_types else None
    with progress() as shown:
        rows = survey(folders, lambda found: shown.track(found, description="reading transformers"))
    if as_json:
        print_json(tables.to_json(rows))
    else:
        console().print(tables.detailed(rows) if model_types else tables.whole(rows))
