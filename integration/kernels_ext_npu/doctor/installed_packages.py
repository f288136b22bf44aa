"""Reads what is installed from metadata and sources: nothing is imported, so that nothing can crash."""

from __future__ import annotations

import ast
import importlib.util
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.machinery import PathFinder
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version


@dataclass(frozen=True)
class Package:
    """A package of the stack."""

    name: str  # its name, as pip knows it
    version: Version | None  # its version, None where there is none, or none that can be read
    requires: tuple[Requirement, ...] = ()  # what it asks of others in this environment
    folder: Path | None = None  # the folder of its module, None where it has none
    trouble: str | None = None  # what is wrong with its installation, None if nothing is

    @property
    def installed(self) -> bool:
        """Whether there is anything of it."""
        return self.version is not None or self.folder is not None

    def __str__(self) -> str:
        return f"{self.name} {self.version or '(version unknown)'}"


def read(name: str) -> Package:
    """Read what the metadata of a package says; whatever is wrong with it is told in `trouble`."""
    folder = module_folder(name.replace("-", "_"))
    package = partial(Package, name, folder=folder)
    try:
        found = list(distributions(name=name))
        if not found:
            trouble = f"its module is in {folder}, but no metadata names its version" if folder else None
            return package(version=None, trouble=trouble)
        written = found[0].metadata["Version"] if found[0].metadata else None
        requires = tuple(_requirements(found[0].requires or ()))
    except Exception as error:  # any file of the metadata may be damaged
        return package(version=None, trouble=f"its metadata cannot be read: {error}")
    try:
        version = Version(written or "")
    except InvalidVersion:
        named = f"names the version {written!r}, which is none" if written else "names no version"
        return package(version=None, requires=requires, trouble=f"its metadata {named}")
    return package(version=version, requires=requires, trouble=None if folder else "it has metadata, but no module")


def module_folder(name: str) -> Path | None:
    """Find the folder of a package of Python, None where there is none."""
    try:
        # what stands on the path comes before what this process has imported
        spec = PathFinder.find_spec(name) or importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.origin:
        return None
    return Path(spec.origin).parent


def constants(path: Path) -> dict[str, Any]:
    """Read what a source file assigns to names at its top: numbers, strings and the like."""
    try:
        tree = ast.parse(path.read_text())
    except (OSError, SyntaxError, ValueError):
        return {}
    found = {}
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value)):
                found[name] = value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=value)):
                found[name] = value
    return found


def _requirements(lines: Any) -> list[Requirement]:
    parsed = []
    for line in lines:
        with suppress(InvalidRequirement):
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                parsed.append(requirement)
    return parsed
