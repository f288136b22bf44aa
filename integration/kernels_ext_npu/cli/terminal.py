"""What all commands share of the terminal: consoles, progress, JSON, and characters that it does not have."""

from __future__ import annotations

import codecs
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

AsJson = Annotated[bool, typer.Option("--json", help="A report on standard output, and nothing else there.")]

_ASCII = {
    "–": "-",
    "—": "-",
    "×": "x",
    "…": "...",
    "·": "*",
    "“": '"',
    "”": '"',
    "‘": "'",
    "’": "'",
    "−": "-",
    "→": "->",
}


class Trimmed:
    """A stream that leaves blanks at the ends of lines away, as the padding of tables is, where it is no terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text that begins and ends with lines."""
        return self._stream.write(text if self._stream.isatty() else re.sub(r"[ \t]+(?=\n)", "", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def console(stderr: bool = False, least: int = 80) -> Console:
    """Return a console for what a command shows.

    Args:
        stderr: whether it is for standard error, as where JSON goes to standard output.
        least: the columns that it has at least: a narrower terminal wraps the lines of tables, and labels stay whole.
    """
    from rich.console import Console

    made = Console(file=Trimmed(sys.stderr if stderr else sys.stdout))  # type: ignore[arg-type]
    if made.width < least:
        made.width = least
    return made


def say(shown: Console, text: str, style: str = "") -> None:
    """Print lines as they are, in whatever width: paths and commands can be copied."""
    shown.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def progress(*columns: Any) -> Iterator[Progress]:
    """Show progress on standard error where that is a terminal; it is gone in the end."""
    from rich.console import Console
    from rich.progress import Progress

    shown = Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    with shown:
        yield shown


def print_json(value: Any) -> None:
    """Print JSON on standard output."""
    typer.echo(json.dumps(value, indent=2))


def allow_all_characters() -> None:
    """Write other characters for those that the encodings of standard output and standard error do not have."""
    codecs.register_error("kernels_ext_npu", _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if not (stream.encoding or "utf-8").lower().startswith("utf"):
            stream.reconfigure(errors="kernels_ext_npu")  # type: ignore[union-attr]


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(_ASCII.get(c, "?") for c in error.object[error.start : error.end]), error.end
