"""What `kernels-ext-npu coverage` prints: tables for a terminal, and JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import transformers
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kernels_ext_npu.catalogue import ACTIVATIONS, KINDS, SERVING, Kind, Repository
from kernels_ext_npu.coverage.survey import UNNAMED, Entry, Folder, Row
from kernels_ext_npu.matching import classification
from kernels_ext_npu.reasons import Reason

NOTHING = "–"
_BREAK = re.compile("(?<=.)(?=[A-Z][a-z])")  # before a word of a name: the header of a column has them in lines
MEANING = (
    "A model type has what the modeling files of its folder in transformers define, and shares it with the other model "
    "types of the folder. After “with” are model types of other folders that its models have parts of, unless a config "
    "names others. Activations are in the sums only. Served means that a kernel computes what the "
    "class or function computes. What can stand in the way of an instance, such as an activation that the kernel does "
    "not have, is in the report of a model."
)


def whole(rows: Sequence[Row]) -> RenderableType:
    """Lay out all rows, what is not served and why, and the sums, for a terminal."""
    kernels = columns(rows)
    cells = _table(f"transformers {transformers.__version__}", "model types")
    cells.show_edge = cells.pad_edge = False  # so that the longest names have room on a terminal of 80 columns
    cells.padding = 0
    for kernel in kernels:
        cells.add_column(_BREAK.sub("\n", kernel.name), justify="right", no_wrap=True)
    for row in not_empty(rows):
        cells.add_row(_name(row), *(_cell(row.entries_for(kernel)) for kernel in kernels))
    nothing = Text(f"\n{nothing_to_serve(rows)}\n", style="dim")
    return Group(cells, "", *_unsupported(rows), nothing, _sums(rows), Text(MEANING, style="dim"))


def detailed(rows: Sequence[Row]) -> RenderableType:
    """Lay out every class and function of some folders, for a terminal."""
    return Group(*(_details(row) for row in rows), Text(MEANING, style="dim"))


def to_json(rows: Sequence[Row]) -> dict:
    """Return for each model type what is in its folder, what all share, and the sums over everything."""
    return {
        "transformers": transformers.__version__,
        "kernels": {k.name: _count(entry for row in rows for entry in row.entries_for(k)) for k in SERVING},
        "kinds": {kind.name: _count(entries_by_kind(rows, kind)) for kind in KINDS},
        "model_types": {
            model_type: {
                "folder": row.folder.name,
                "kernels": {kernel.name: _count(row.entries_for(kernel)) for kernel in SERVING},
                "entries": _entries(row),
                "with": list(row.parts),
                "not_imported": row.missing,
            }
            for row in rows
            for model_type in row.folder.model_types
        },
        "shared": [entry for row in rows if not row.folder.model_types for entry in _entries(row)],
    }


def cell(found: Sequence[Entry]) -> str:
    """Say how many are served of all, such as "2/3", or give a dash where there is nothing."""
    return f"{sum(entry.layer is not None for entry in found)}/{len(found)}" if found else NOTHING


def main_rows(rows: Sequence[Row]) -> list[Row]:
    """Return all rows but that of what models of every type share."""
    return [row for row in rows if row.folder.model_types]


def columns(rows: Sequence[Row]) -> list[Repository]:
    """Return the kernels that serve something which belongs to a model type, or would.

    Activations belong to all of them, though Bloom has one of its own.
    """
    kernels = [kernel for kernel in SERVING if kernel.kinds != (ACTIVATIONS,)]
    return [kernel for kernel in kernels if any(row.entries_for(kernel) for row in main_rows(rows))]


def not_empty(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that have something that is counted, in their parts too, or that could not be read."""
    rows = main_rows(rows)
    found = {row.folder for row in rows if row.entries or row.missing or UNNAMED in row.parts}
    while more := {row.folder for row in rows if _types(found).intersection(row.parts)} - found:
        found |= more
    return [row for row in rows if row.folder in found]


def nothing_to_serve(rows: Sequence[Row], quote: str = "") -> str:
    """Name the model types of all other rows."""
    names = sorted(_types(row.folder for row in rows) - _types(row.folder for row in not_empty(rows)))
    return f"Nothing to serve in {len(names)} model types: {', '.join(f'{quote}{name}{quote}' for name in names)}."


def counted(rows: Sequence[Row]) -> str:
    """Say how many model types there are."""
    folders = [row.folder for row in main_rows(rows)]
    return f"{sum(len(folder.model_types) for folder in folders)} model types in {len(folders)} folders"


def sums(rows: Sequence[Row]) -> list[list[str]]:
    """Return a row of kernel, kind, served and not served for every kind that transformers has classes of."""
    kinds = [(kernel, kind, entries_by_kind(rows, kind)) for kernel in SERVING for kind in kernel.kinds]
    counted = [(kernel, kind, _count(found)) for kernel, kind, found in kinds if found]
    return [[kernel.name, kind.name, str(n["served"]), str(n["kept"])] for kernel, kind, n in counted]


def entries_by_kind(rows: Iterable[Row], kind: Kind) -> list[Entry]:
    """Return what is counted among a kind."""
    return [entry for row in rows for entry in row.entries if entry.kind == kind.name]


def unsupported_by_reason(rows: Iterable[Row], kind: Kind) -> dict[Reason, list[Entry]]:
    """Return what is not served of a kind by its reason, by the code of the reason, and those of most entries first."""
    found: dict[Reason, list[Entry]] = {}
    for entry in entries_by_kind(rows, kind):
        if entry.reason is not None:
            found.setdefault(entry.reason, []).append(entry)
    return dict(
        sorted(found.items(), key=lambda item: (classification.CODES.index(item[0].code), -len(item[1]), item[0]))
    )


def display_name(entry: Entry) -> str:
    """Return the name of an entry; that of a function has its file before it.

    Functions of many files have the same name; classes begin with their architecture's.
    """
    return entry.name if entry.name[0].isupper() else f"{entry.file}:{entry.name}"


def _entries(row: Row) -> list[dict[str, str | None]]:
    return [
        {"kernel": kernel.name, "kind": e.kind, "name": e.name, "layer": e.layer, "reason": e.reason}
        for kernel in SERVING
        for e in row.entries_for(kernel)
    ]


def _types(folders: Iterable[Folder]) -> set[str]:
    return {name for folder in folders for name in folder.model_types}


def _table(title: str, *headers: str) -> Table:
    return Table(*headers, box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")


def _name(row: Row) -> Text:
    name = Text(", ".join(row.folder.model_types))
    if row.parts:
        name.append(f"\n  with {', '.join(row.parts)}", style="dim")
    for file, why in row.missing.items():
        name.append(f"\n  {file} {why}", style="yellow")
    return name


def _cell(found: Sequence[Entry]) -> Text:
    served = sum(entry.layer is not None for entry in found)
    style = "dim" if not found else "green" if served == len(found) else "yellow" if served else "red"
    return Text(cell(found), style=style)


def _unsupported(rows: Sequence[Row]) -> Iterator[RenderableType]:
    for kind in KINDS:
        reasons = unsupported_by_reason(rows, kind)
        yield Text(f"{kind.name}, not served: {sum(map(len, reasons.values()))}", style="bold")
        shown = Table.grid(padding=(0, 1))
        shown.add_column(justify="right", min_width=4)
        for reason, found in reasons.items():
            which = ", ".join(sorted(display_name(entry) for entry in found))
            shown.add_row(str(len(found)), Text.assemble(f"{reason}: ", (which, "dim")))
        yield shown


def _sums(rows: Sequence[Row]) -> Table:
    shown = _table(counted(rows), "kernel", "")
    shown.add_column("served", justify="right")
    shown.add_column("not served", justify="right")
    before = ""
    for kernel, kind, *numbers in sums(rows):
        shown.add_row(kernel if kernel != before else "", kind, *numbers)
        before = kernel
    return shown


def _details(row: Row) -> RenderableType:
    shown = _table(f"{', '.join(row.folder.model_types)}: models/{row.folder.name}", "", "class or function", "layer")
    for kernel in SERVING:
        for entry in row.entries_for(kernel):
            reason = Text(f"not served: {entry.reason}", style="yellow")
            served = Text(entry.layer, style="green") if entry.layer else reason
            shown.add_row(entry.kind, Text(entry.name, overflow="fold"), served)
    notes = [f"{file} {why}" for file, why in row.missing.items()]
    if not row.folder.files:
        notes.append("It has no modeling file.")
    elif not row.entries and not row.missing:
        notes.append("It defines nothing that is counted.")
    if row.parts:
        notes.append(f"It has parts of other model types, unless a config names others: {', '.join(row.parts)}.")
    heading: RenderableType = shown if row.entries else Text(str(shown.title), style="bold")
    return Group(heading, *(Text(f" {note}") for note in notes))


def _count(found: Iterable[Entry]) -> dict[str, int]:
    layers = [entry.layer is not None for entry in found]
    return {"served": sum(layers), "kept": len(layers) - sum(layers)}
