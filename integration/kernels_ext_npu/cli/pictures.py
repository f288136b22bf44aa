"""Whether a picture can be drawn into a file, found out before anything is counted or measured for it."""

from __future__ import annotations

import importlib.util
from pathlib import Path


class CannotDrawError(Exception):
    """There can be no picture at a path. The message says why."""


def check(path: Path) -> None:
    """Check now that a picture can be drawn into a file, rather than after minutes of counting or measuring.

    Raises:
        CannotDrawError: matplotlib is missing or does not know the suffix, or the file cannot be written.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise CannotDrawError("--plot needs matplotlib: pip install 'kernels-ext-npu[plot]', or pip install matplotlib")
    from matplotlib.backend_bases import FigureCanvasBase

    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lower().removeprefix(".") not in known:
        raise CannotDrawError(f"--plot {path}: the name has to end in one of .{', .'.join(known)}")
    there = path.exists()
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise CannotDrawError(f"--plot {path} cannot be written: {error.strerror}") from error
    if not there:
        path.unlink()
