"""The page of `kernels-ext-npu coverage --markdown`, which is docs/coverage.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import transformers

from kernels_ext_npu.catalogue import KINDS, Kind
from kernels_ext_npu.coverage.survey import Row
from kernels_ext_npu.coverage.tables import (
    cell,
    columns,
    counted,
    name_of,
    not_empty,
    nothing_to_serve,
    sums,
    unsupported_by_reason,
)
from kernels_ext_npu.matching.classification import text_of

_INTRODUCTION = """\
# What of transformers {version} is served

Written by `make docs`: what `kernels-ext-npu coverage` finds in the modeling files of transformers.
`kernels-ext-npu coverage qwen3` names each class and function of a model type, and `kernels-ext-npu coverage` counts
those of the transformers that is installed.

**Served** means that a kernel computes what the class or function computes; the syntax tree decides, not the name.
What is **not served** keeps its forward, for the reasons below. What can stand in the way of an instance, such as an
activation that a kernel does not have, is in `report(model)`.

**Model types** are what `model_type` in a `config.json` says. transformers has a folder for those of a family and says
which it is: a row is a folder, and its numbers are about the classes and functions that its modeling files define. A
model type whose folder has no modeling file is in the row of the class that transformers makes for it. Many models are
made of models in other folders: *with* names those that it takes unless a config names others.
Activations are in the sums only: all but Bloom's are in `activations.py` of transformers, for models of all types.
"""


def page(rows: Sequence[Row]) -> str:
    """Return the whole page: sums, a row for each folder of transformers, and what is not served and why."""
    kernels = [kernel.name for kernel in columns(rows)]
    by_type = [[_name(row), *cells(rows, row)] for row in not_empty(rows)]
    parts = [
        _INTRODUCTION.format(version=transformers.__version__),
        f"## {counted(rows)}\n",
        "Cells are served of all; `–` where there is nothing of the kind.\n",
        table(["kernel", "for", "served", "not served"], sums(rows), right=2),
        "## By model type\n",
        table(["model types", *kernels], by_type, right=len(kernels)),
        f"{nothing_to_serve(rows, quote='`')}\n",
        "## What is not served, and why\n",
        *(_unsupported(rows, kind) for kind in KINDS),
    ]
    return "\n".join(parts)


def cells(rows: Sequence[Row], row: Row) -> list[str]:
    """Return a cell for each of the kernels that have a column: what is served of what there is."""
    return [cell(row.of(kernel)) for kernel in columns(rows)]


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], right: int) -> str:
    """Return a table in Markdown, with the last columns to the right."""
    rules = ["---"] * (len(headers) - right) + ["---:"] * right
    return "".join(f"| {' | '.join(row)} |\n" for row in (headers, rules, *rows))


def _name(row: Row) -> str:
    name = ", ".join(f"`{model_type}`" for model_type in row.folder.model_types)
    if row.parts:
        name += f"<br>*with* {', '.join(f'`{part}`' for part in row.parts)}"
    return name + "".join(f"<br>`{file}` {why}" for file, why in row.missing.items())


def _unsupported(rows: Sequence[Row], kind: Kind) -> str:
    """Return the table of what is not served of a kind, by the codes of the reasons."""
    found = [
        [reason.code, text_of(reason), ", ".join(f"`{name}`" for name in sorted(map(name_of, entries)))]
        for reason, entries in unsupported_by_reason(rows, kind).items()
    ]
    return f"### {kind.name.capitalize()}\n\n{table(['why', 'reason', 'which'], found, right=0)}"
