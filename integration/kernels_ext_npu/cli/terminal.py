"""What all commands share: consoles, progress, JSON, characters that a terminal does not have, and how one refuses.

A command that cannot do what was asked says so in one sentence on standard error, and ends with an exit code.
"""

from __future__ import annotations

import codecs
import importlib.util
import json
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

from kernels_ext_npu.environment import RefusedError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

AsJson = Annotated[bool, typer.Option("--json", help="A report on standard output, and nothing else there.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the code that a checkpoint brings: read it before.")
]

_ASCII = dict(zip("–—−×·“”‘’", "---x*\"\"''")) | {"…": "...", "→": "->"}


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


class Commands(TyperGroup):
    """The group of all commands: whatever ends one is told on standard error, and in characters that it has."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run a command."""
        allow_all_characters()
        return super().main(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        """Run a command; what it refuses ends it with a sentence, and what it did not expect with 2.

        No exception leaves it: torch_npu's hook for these prints to standard output when the process ends.
        """
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()
        except (typer.Abort, BrokenPipeError):  # whoever read what was printed has read enough
            raise
        except RefusedError as error:
            typer.echo(f"kernels-ext-npu: {error}", err=True)
            raise typer.Exit(error.code) from error
        except OSError as error:
            typer.echo(f"kernels-ext-npu: {error}", err=True)
            with suppress(OSError):  # what could not be written is not tried again when Python ends
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except Exception as error:
            if hasattr(error, "exit_code"):  # typer's own
                raise
            traceback.print_exc()
        raise typer.Exit(2)


def take_device(needed: bool) -> None:
    """Import the software device, which has to be before torch, and changes nothing where there is an NPU.

    Where it cannot be imported, since there is no torch_npu or no compiler, a command that computes on it is refused.
    One that only reads goes on, as on a machine without an NPU; but where torch_npu is installed, torch loads it by
    itself and would fail, so that is refused too.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # what these warn of is none of a reader's business here
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        import softnpu  # noqa: F401
    except ImportError as error:
        if needed or importlib.util.find_spec("torch_npu") is not None:
            raise RefusedError(str(error)) from error


def check_file(option: str, path: Path | None) -> None:
    """Refuse a file that cannot be written, now rather than after minutes of computing."""
    if path is None:
        return
    there = path.exists()
    write_file(option, path, "", mode="a")
    if not there:
        path.unlink()


def write_file(option: str, path: Path, text: str, mode: str = "w") -> None:
    """Write a file that an option names, or refuse it."""
    try:
        with path.open(mode) as file:
            file.write(text)
    except OSError as error:
        parent = path.absolute().parent
        missing = "" if parent.is_dir() else f": there is no folder {parent}"
        raise RefusedError(f"{option} {path} cannot be written: {error.strerror}{missing}") from error


def check_picture(path: Path | None) -> None:
    """Refuse a file of ``--plot`` now, into which no picture can be drawn."""
    if path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise RefusedError("--plot needs matplotlib: pip install 'kernels-ext-npu[plot]', or pip install matplotlib")
    from matplotlib.backend_bases import FigureCanvasBase

    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lower().removeprefix(".") not in known:
        raise RefusedError(f"--plot {path}: the name has to end in one of .{', .'.join(known)}")
    check_file("--plot", path)
