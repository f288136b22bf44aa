"""How a command says that it cannot do what was asked: one sentence on standard error, and an exit code."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from kernels_ext_npu.cli import terminal
from kernels_ext_npu.environment import RefusedError


class Commands(TyperGroup):
    """The group of all commands: whatever ends one is told on standard error, and in characters that it has."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run a command."""
        terminal.allow_all_characters()
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

    Raises:
        RefusedError: it cannot be imported; the message says why.
    """
    try:
        import softnpu  # noqa: F401
    except ImportError as error:
        if needed or importlib.util.find_spec("torch_npu") is not None:
            raise RefusedError(str(error)) from error


def check_file(option: str, path: Path | None) -> None:
    """Check now that a file can be written, rather than after minutes of computing.

    Raises:
        RefusedError: it cannot be written.
    """
    if path is None:
        return
    there, parent = path.exists(), path.absolute().parent
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        missing = "" if parent.is_dir() else f": there is no folder {parent}"
        raise RefusedError(f"{option} {path} cannot be written: {error.strerror}{missing}") from error
    if not there:
        path.unlink()


def check_picture(path: Path | None) -> None:
    """Check now that a picture can be drawn into the file of ``--plot``.

    Raises:
        RefusedError: matplotlib is missing or does not know the suffix, or the file cannot be written.
    """
    if path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise RefusedError("--plot needs matplotlib: pip install 'kernels-ext-npu[plot]', or pip install matplotlib")
    from matplotlib.backend_bases import FigureCanvasBase

    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lower().removeprefix(".") not in known:
        raise RefusedError(f"--plot {path}: the name has to end in one of .{', .'.join(known)}")
    check_file("--plot", path)
