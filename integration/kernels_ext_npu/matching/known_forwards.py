"""The forwards and functions of transformers that kernels replace, known by fingerprint: known_forwards.json.

Each is there by where transformers has it, ``file:name``, with ``@5.22`` behind it where another release has something
else under that name. Whatever has the same fingerprint, in whatever file, computes the same.
``scripts/known_forwards.py`` writes those of the installed release. The classes of torch have none: they are what the
installed torch has.
"""

from __future__ import annotations

import importlib
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

from kernels_ext_npu.matching.fingerprint import (
    class_methods,
    compared_methods,
    fingerprint,
    is_experts_class,
    names_hash,
)

FILE = Path(__file__).with_suffix(".json")
# what transformers' decorator makes of a class, which says itself what it computes: it has no fingerprint
EXPERTS = "qwen3_moe:Qwen3MoeExperts"
_MODULES = {"torch": "torch.nn", "activations": "transformers.activations"}


def known_name(what: object) -> str | None:
    """Return the name of what computes the same as a class or a function does; None where it is not known."""
    if isinstance(what, type):
        if is_experts_class(what):
            return EXPERTS
        if (own := _torchs_own().get(getattr(what, "forward", None))) is not None:
            names = compared_methods(own, own.forward)  # type: ignore[arg-type]
            return f"torch:{own.__name__}" if class_methods(what, names) == class_methods(own, names) else None
    known = _by_names_hash().get(names_hash(what))  # the source of most is never read
    return None if known is None else known.get(fingerprint(what) or "")


def known_original(name: str) -> Any:
    """Return the class or function of the installed transformers that has a name.

    Raises:
        LookupError: this release has none, or something else under the name.
    """
    found = find_named(name)
    if known_name(found) != name:
        raise LookupError(f"the installed transformers has something else at {name}")
    return found


def is_installed(name: str) -> bool:
    """Tell whether the installed transformers has what has a name."""
    try:
        known_original(name)
    except LookupError:
        return False
    return True


def find_named(name: str) -> Any:
    """Return what stands where a name says, whatever it computes.

    Raises:
        LookupError: nothing stands there.
    """
    file, _, attribute = name.partition("@")[0].partition(":")
    try:
        module = importlib.import_module(_MODULES.get(file, f"transformers.models.{file}.modeling_{file}"))
        return getattr(module, attribute)
    except (AttributeError, ImportError) as error:
        raise LookupError(f"the installed transformers has nothing at {name}") from error


@cache
def _torchs_own() -> dict[Any, type[nn.Module]]:
    """Return the classes of torch that are known, by their forwards, but for those that somebody has replaced."""
    found: dict[Any, type[nn.Module]] = {cls.forward: cls for cls in (nn.Conv2d, nn.Conv3d, nn.RMSNorm, nn.Sigmoid)}
    return {each: cls for each, cls in found.items() if each.__globals__ is vars(sys.modules[cls.__module__])}


@cache
def _by_names_hash() -> dict[str, dict[str, str]]:
    """Return names by fingerprints, by the hash of the names that their code reads."""
    found: dict[str, dict[str, str]] = {}
    for name, known in json.loads(FILE.read_text()).items():
        for each in known:
            names, _, tree = each.partition("-")
            found.setdefault(names, {})[tree] = name
    return found
