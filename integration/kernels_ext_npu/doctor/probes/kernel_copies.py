"""A probe of the kernel repositories on disk: intact or not, which variant fits, and what the Hub's cache holds."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kernels_ext_npu.machine.processes import say

COPIES = "verifying the kernels"


def copies_and_cache(source: str, torch: str, cann: str | None, arch: str) -> None:
    """Say which variants there are, which one is taken here, and whether their files are intact."""
    say(step="import kernels")
    from kernels_ext_npu import catalogue, sources
    from kernels_ext_npu.distribution import variant_choice
    from kernels_ext_npu.distribution.verification import verify_build

    machine = variant_choice.describe(torch, cann, arch)
    if source != "hub":
        say(step=COPIES)
        root = sources.root(source)
        there = [root / name for name in catalogue.REPOSITORIES if (root / name / "build").is_dir()]
        found = {path.name: _verified(verify_build(path / "build"), f"{path.name}/build", machine) for path in there}
        say(root=str(root), copies=found)
    say(step="reading the Hub's cache")
    say(**_cache())
    for name in catalogue.REPOSITORIES:
        say(**{f"cached {name}": _cached(name, machine)})


def _verified(found: list[Any], where: str, machine: Any) -> dict[str, Any]:
    from kernels_ext_npu.distribution import variant_choice

    return {
        "problems": [f"{where}/{entry.variant}/{line}" for entry in found for line in entry.problems],
        "decisions": [asdict(decision) for decision in variant_choice.decide_among(found, machine)],
    }


def _cache() -> dict[str, Any]:
    from huggingface_hub import constants

    from kernels_ext_npu.distribution import hub_cache
    from kernels_ext_npu.distribution.bundle_archive import BundleError

    facts: dict[str, Any] = {"offline": constants.HF_HUB_OFFLINE, "hub_cache": constants.HF_HUB_CACHE}
    try:
        folder = hub_cache.folder()
    except BundleError as error:
        return facts | {"refused": str(error)}
    nearest = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
    trouble = None
    if not os.path.isdir(nearest):
        trouble = f"{nearest} is not a folder"
    elif folder == nearest and not os.access(folder, os.R_OK | os.X_OK):
        trouble = f"{folder} may not be read by this user"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        trouble = f"{nearest} may not be written by this user"
    return facts | {"cache": str(folder), "trouble": trouble}


def _cached(name: str, machine: Any) -> dict[str, Any]:
    """Look for a repository as `kernels` does without a network: it wants a note of the commit and all files of it."""
    from kernels_ext_npu import sources
    from kernels_ext_npu.distribution import hub_cache, targets
    from kernels_ext_npu.environment import RefusedError

    try:
        folder = hub_cache.folder()
        snapshots = folder / f"kernels--{sources.ORGANISATION}--{name}" / "snapshots"
        if not snapshots.is_dir() or not any(snapshots.iterdir()):
            return {"state": "absent"}
        try:
            snapshot = _offline(f"{sources.ORGANISATION}/{name}", folder)
        except Exception as error:  # whatever the Hub's client makes of what it finds
            return {"state": "incomplete", "reason": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        found = _verified([entry for target in targets.find(snapshot) for entry in target.verify()], name, machine)
        return {"state": "damaged" if found["problems"] else "complete", "commit": snapshot.name} | found
    except (OSError, ValueError, RefusedError) as error:
        return {"state": "unreadable", "reason": f"{type(error).__name__}: {error}"}


def _offline(repo_id: str, folder: Path) -> Path:
    """Return the folder that `kernels` would load from."""
    from huggingface_hub import HfApi
    from kernels.resolver import _BYTECODE_IGNORE_PATTERNS

    from kernels_ext_npu import sources
    from kernels_ext_npu.distribution import published

    found = HfApi().snapshot_download(
        repo_id,
        repo_type=published.KERNEL,
        revision=published.cached_commit(repo_id, sources.VERSION),
        cache_dir=folder,
        ignore_patterns=_BYTECODE_IGNORE_PATTERNS,
        local_files_only=True,
    )
    return Path(str(found)).resolve()
