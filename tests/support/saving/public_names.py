"""Find the public names under which what is installed saves and loads; those that are left out are listed, with why."""

import importlib
import re
from pathlib import Path
from typing import Any

_SPELLINGS = re.compile(r"(?:^|_)(?:save|load|push|dump|offload|unload|dispatch|state_dict|pretrained|shards)(?:_|$)")
_MERGES = re.compile(r"^merge_(?:and_unload|adapter|fsdp_weights)$")

DATA = Path(__file__).resolve().parents[2] / "data"
OWNERS = (DATA / "saving_owners.txt").read_text().split()  # modules and classes
# names, each below the reason for which it is left out
LEFT_OUT = DATA / "saving_left_out.txt"


def left_out() -> list[str]:
    return [line.strip() for line in LEFT_OUT.read_text().splitlines() if line.startswith(" ")]


def resolve(path: str) -> Any:
    """Return what a public name is; a method as the function that it is."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return getattr(found, "__func__", found)
    raise ImportError(path)


def exported() -> dict[str, Any]:
    """Return everything that the installed libraries offer under such a name, each once, by the first of its names."""
    found: dict[int, tuple[str, Any]] = {}
    for path in OWNERS:
        owner = resolve(path)
        library = path.partition(".")[0]
        for name in dir(owner):
            if name.startswith("_") or not (_SPELLINGS.search(name) or _MERGES.search(name)):
                continue
            value = resolve(f"{path}.{name}")
            if callable(value) and (getattr(value, "__module__", None) or "").startswith(library):
                found.setdefault(id(value), (f"{path}.{name}", value))
    return dict(found.values())
