"""Find the generated parts of the documents, and the documents that are generated as a whole.

A part stands between ``<!-- name:start ... -->`` and ``<!-- name:end -->`` on lines of their own, in any document in
Markdown. What stands there comes from PARTS, in Chinese in a document that is called ``*.zh.md``.

What of transformers is served is told of the newest release that is supported, with which `make docs` runs once more;
all the rest comes from the release that is installed for everything else.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import transformers

from documents import (
    DocumentError,
    coverage,
    inside,
    notebook,
    parallel,
    ratios,
    rent,
    same_numbers,
    savings,
    variants,
    way,
)
from kernels_ext_npu.matching.classification import COUNTED

# name -> language, "en" or "zh" -> lines
PARTS: dict[str, Callable[[str], str]] = {
    "best-known": coverage.best_known,
    "coverage": coverage.summary,
    "inside": inside.table,
    "ranks": parallel.tables,
    "ratios": ratios.table,
    "rent": rent.table,
    "same-numbers": same_numbers.table,
    "savings": savings.table,
    "variants": variants.table,
    "way": way.table,
}
# path -> content
FILES: dict[str, Callable[[], bytes]] = {"docs/coverage.md": coverage.page, notebook.PATH: notebook.run}

NEWEST_ONLY = {"best-known", "coverage", "docs/coverage.md"}

_DOCUMENTS = ("*.md", "docs/**/*.md")
_PART = re.compile(r"^(<!-- ([\w-]+):start\b[^\n]*-->\n)(.*?)^(?=<!-- \2:end -->$)", re.MULTILINE | re.DOTALL)
_MARKER = re.compile(r"^<!-- [\w-]+:(?:start|end)\b", re.MULTILINE)


def is_due(name: str) -> bool:
    """Tell whether a part or a file is generated with the release of transformers that is installed."""
    return (name in NEWEST_ONLY) == (transformers.__version__ == COUNTED)


def stale(root: Path) -> dict[Path, bytes]:
    """Return what the files of a clone have to become that are not what they have to be, of those that are due.

    Raises:
        DocumentError: a marker lacks its other half, or nothing generates what it is called.
    """
    wanted = {root / path: generate() for path, generate in FILES.items() if is_due(path)}
    for path in {path for glob in _DOCUMENTS for path in root.glob(glob)} - wanted.keys():
        if _MARKER.search(text := path.read_text("utf-8")):
            wanted[path] = rewrite(text, path).encode()
    return {path: wanted[path] for path in sorted(wanted) if not path.is_file() or path.read_bytes() != wanted[path]}


def rewrite(text: str, path: Path) -> str:
    """Return a document with those of its generated parts that are due as they have to be."""
    language = "zh" if path.name.endswith(".zh.md") else "en"
    parts = list(_PART.finditer(text))
    if 2 * len(parts) != len(_MARKER.findall(text)):
        raise DocumentError(f"{path}: every <!-- name:start --> needs a <!-- name:end -->, each alone on its line")
    for name in {part[2] for part in parts} - PARTS.keys():
        raise DocumentError(f"{path}: nothing generates <!-- {name}:start -->, only {', '.join(PARTS)}")
    return _PART.sub(lambda part: part[1] + (PARTS[part[2]](language) if is_due(part[2]) else part[3]), text)
