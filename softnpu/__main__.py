"""Run a program on the software device: ``python -m softnpu script.py ...`` or ``python -m softnpu -m package ...``."""

import atexit
import runpy
import sys
from pathlib import Path

import softnpu  # before the program imports torch

NO_TIMES = "softnpu: these are times of the host, which computed it all: they say nothing about a card"
USAGE = "usage: python -m softnpu (script.py | -m module) [arguments]"


def main() -> None:
    """Read the command line and run the script or module that it names, with the arguments behind it."""
    if len(sys.argv) < 2 or sys.argv[1:] == ["-m"] or sys.argv[1] in ("-h", "--help"):
        raise SystemExit(USAGE)
    if sys.argv[1] == "-m":
        sys.argv = sys.argv[2:]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    script = Path(sys.argv[1])
    if not script.exists():
        raise SystemExit(f"softnpu: there is no {script}\n{USAGE}")
    sys.argv = sys.argv[1:]
    if softnpu.is_software() and script.name == "kernels" and sys.argv[1:2] == ["benchmark"]:
        atexit.register(print, NO_TIMES, file=sys.stderr)  # below its table, which has no other columns
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
