"""Files that pictures are drawn into."""

from __future__ import annotations

import importlib.util
from pathlib import Path


class CannotDrawError(Exception):
    """There can be no picture at a path. The message says why."""


def check(path: Path) -> None:
    """Raise CannotDrawError now, rather than after minutes of counting or measuring."""
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
