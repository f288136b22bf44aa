"""Write the reference of the public names, from their docstrings, as HTML: `make reference`.

python scripts/reference.py site
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pdoc

import kernels_ext_npu
import softnpu  # before torch

PACKAGES = (kernels_ext_npu, softnpu)


def write(folder: Path) -> None:
    """Write a page for each package, with the names of its ``__all__`` alone, and an index of all of them."""
    for package in PACKAGES:
        for name in package.__all__:
            setattr(package, name, getattr(package, name))  # pdoc looks for them in the package's dictionary
    pdoc.render.configure(docformat="google", show_source=False)
    names = [package.__name__ for package in PACKAGES]
    pdoc.pdoc(*names, *(rf"!{name}\." for name in names), output_directory=folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)
