"""What of the installed transformers has a kernel: norms, gated MLPs, experts, routers and rotary functions."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import transformers.models
from rich import box
from rich.table import Table
from torch import nn

from kernels_ext_npu.layers import LAYERS
from kernels_ext_npu.matching import find_function_reference, find_reference, is_experts_class, original_function

COUNTED = "5.22.2"  # the release of transformers that kept.json is about
# kind -> reason -> names; functions as "file:name", methods as "file:Class.name"
KEPT: dict[str, dict[str, list[str]]] = json.loads(Path(__file__).with_name("kept.json").read_text())
NORMS, MLPS, EXPERTS, ROUTERS, ROTARY = KEPT
UNKNOWN = "computes something else, which nobody has looked at yet"

_MLP_NAMES = re.compile(r"MLP|Mlp|FFN|FeedForward|GatedActDense|SwiGLU|GLU|SharedExpert")
_ROUTER_NAMES = re.compile("Router$|(Expert|MoE|Moe|TopK).*(Gate|Gating)$|MoEV1Gate$")
_HELPERS = ("rotate_half", "rotate_every_two", "rotate_pairwise")


@dataclass(frozen=True)
class Entry:
    """A class or function of transformers.

    Attributes:
        kind: what it is.
        name: its name.
        layer: the layer that serves it; for a gated MLP those between which the activation of an instance decides.
        reason: why none does.
    """

    kind: str
    name: str
    layer: str | None
    reason: str | None


def survey() -> list[Entry]:
    """Reads all modeling files, which takes a quarter of a minute."""
    entries = [_entry(NORMS, cls.__name__, _layer(cls)) for cls in norm_classes()]
    entries += [_entry(MLPS, cls.__name__, _layer(cls)) for cls in mlp_classes()]
    entries += [_entry(EXPERTS, cls.__name__, _layer(cls)) for cls in experts_classes()]
    entries += [_entry(ROUTERS, cls.__name__, _layer(cls)) for cls in router_classes()]
    for name, function in rotary_functions().items():
        reference = find_function_reference(function)
        entries.append(_entry(ROTARY, name, reference.layer if reference else None))
    methods = [(name, reason) for reason, names in KEPT[ROTARY].items() for name in names if "." in name]
    return entries + [Entry(ROTARY, name, None, reason) for name, reason in methods]


def table(entries: list[Entry]) -> Table:
    """How many are served by which layer, and how many are kept for which reason."""
    shown = Table(box=box.SIMPLE_HEAD, title=f"transformers {transformers.__version__}", title_justify="left")
    shown.add_column("")
    shown.add_column("number", justify="right")
    shown.add_column("layer that serves them, or reason why none does")
    for kind in KEPT:
        rows = [entry for entry in entries if entry.kind == kind]
        for served in (True, False):
            found = Counter(entry.layer or entry.reason for entry in rows if (entry.layer is not None) == served)
            label = f"{kind}, {'served' if served else 'kept'}"
            shown.add_row(f"[bold]{label}[/]", f"[bold]{found.total()}[/]", "")
            for name, count in found.most_common():
                shown.add_row("", str(count), name)
    return shown


@cache
def norm_classes() -> tuple[type[nn.Module], ...]:
    """Those that transformers decorates for one of our layers, those that match, and all others called RMSNorm."""
    return tuple(
        cls
        for cls in module_classes()
        if LAYERS.get(getattr(cls, "kernel_layer_name", ""), "") == "RMSNorm"
        or is_served_by(cls, "RMSNorm")
        or "rmsnorm" in cls.__name__.lower()
    )


@cache
def mlp_classes() -> tuple[type[nn.Module], ...]:
    """Those that match, and all others that look like one: called so, and with a gate in their forward."""
    return tuple(
        cls
        for cls in module_classes()
        if is_served_by(cls, "SwiGLU") or (_looks_gated(cls) and not is_experts_class(cls))
    )


@cache
def experts_classes() -> tuple[type[nn.Module], ...]:
    """Those with transformers' experts interface, and all others called experts."""
    return tuple(
        cls
        for cls in module_classes()
        if is_experts_class(cls) or (re.search("Experts$|NaiveMoe$", cls.__name__) and cls not in mlp_classes())
    )


@cache
def router_classes() -> tuple[type[nn.Module], ...]:
    """All that are called so; and what is a gate of experts by its name."""
    return tuple(cls for cls in module_classes() if _ROUTER_NAMES.search(cls.__name__))


@cache
def rotary_functions() -> dict[str, object]:
    """file:name -> the function, or what `kernels` made of it."""
    return {
        f"{module.__name__.rpartition('modeling_')[2]}:{name}": value
        for module in modeling_files()
        for name, value in vars(module).items()
        if _is_defined_in(original_function(value), module) and _is_rotary(name, value)
    }


def is_served_by(cls: type[nn.Module], repository: str) -> bool:
    reference = find_reference(cls)
    return reference is not None and reference.repository == repository


def module_classes() -> Iterator[type[nn.Module]]:
    """Every module of every architecture that can be imported."""
    for module in modeling_files():
        for value in vars(module).values():
            if inspect.isclass(value) and issubclass(value, nn.Module) and _is_defined_in(value, module):
                yield value


@cache
def modeling_files() -> tuple[ModuleType, ...]:
    """The modeling files of transformers whose requirements are installed."""
    found = []
    for package in pkgutil.iter_modules(transformers.models.__path__):
        folder = Path(transformers.models.__path__[0]) / package.name
        for path in sorted(folder.glob("modeling_*.py")):
            with suppress(ImportError):  # it needs a package that is not installed
                found.append(importlib.import_module(f"transformers.models.{package.name}.{path.stem}"))
    return tuple(found)


def _entry(kind: str, name: str, layer: str | None) -> Entry:
    reason = None if layer else next((r for r, names in KEPT[kind].items() if name in names), UNKNOWN)
    return Entry(kind, name, layer, reason)


def _layer(cls: type[nn.Module]) -> str | None:
    reference = find_reference(cls)
    return " or ".join(reference.layers) if reference else None


def _is_defined_in(value: object, module: ModuleType) -> bool:
    return getattr(value, "__module__", None) == module.__name__


def _looks_gated(cls: type[nn.Module]) -> bool:
    if not _MLP_NAMES.search(cls.__name__):
        return False
    try:
        source = inspect.getsource(cls.forward)
    except (OSError, TypeError):
        return False
    return bool(re.search(r"act|silu|gelu|swish", source)) and " * " in source


def _is_rotary(name: str, function: object) -> bool:
    """By its name, by what it was decorated for, or because it calls a helper that rotates."""
    if find_function_reference(function) is not None or "rotary" in getattr(type(function), "kernel_layer_name", ""):
        return True
    if name.startswith(_HELPERS):  # they are part of what calls them
        return False
    if any(word in name for word in ("rotary", "rope", "rotate")):
        return True
    original = original_function(function)
    try:
        tree = ast.parse(inspect.getsource(original).lstrip()) if original else None
    except (OSError, SyntaxError):
        return False
    calls = [ast.unparse(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)] if tree else []
    return any(callee.startswith("rotate") for callee in calls)
