"""The kernel repositories on disk: intact or not, which variant fits, and what the Hub's cache holds of them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from kernels_ext_npu.doctor.probe import note, step

COPIES, CACHE = "verifying the kernels", "reading the Hub's cache"


def probe(source: str, torch: str, cann: str | None, arch: str) -> None:
    """Note which variants there are, which one is taken here, and whether their files are intact."""
    step("import kernels")
    from kernels_ext_npu import catalogue, sources
    from kernels_ext_npu.distribution import machines

    machine = machines.describe(torch, cann, arch)
    if source != "hub":
        step(COPIES)
        root = sources.root(source)
        note(root=str(root), copies={name: _copy(root / name, machine) for name in catalogue.REPOSITORIES})
    step(CACHE)
    note(**_cache())
    for name in catalogue.REPOSITORIES:
        note(**{f"cached {name}": _cached(name, machine)})


def _copy(folder: Path, machine: Any) -> dict[str, Any]:
    from kernels_ext_npu.distribution import machines
    from kernels_ext_npu.distribution.verification import verify_build

    if not (folder / "build").is_dir():
        return {"missing": str(folder / "build")}
    found = verify_build(folder / "build")
    variants = [entry.variant for entry in found if (entry.path / "metadata.json").exists()]
    return {
        "problems": [f"{folder.name}/build/{entry.variant}/{line}" for entry in found for line in entry.problems],
        "decisions": [asdict(decision) for decision in machines.decide(variants, machine)],
    }


def _cache() -> dict[str, Any]:
    import os

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
    from kernels_ext_npu.distribution import hub_cache, machines, targets
    from kernels_ext_npu.distribution.bundle_archive import BundleError

    try:
        folder = hub_cache.folder()
        snapshots = folder / f"kernels--{sources.ORGANISATION}--{name}" / "snapshots"
        if not snapshots.is_dir() or not any(snapshots.iterdir()):
            return {"state": "absent"}
        try:
            snapshot = _offline(f"{sources.ORGANISATION}/{name}", folder)
        except Exception as error:  # whatever the Hub's client makes of what it finds
            return {"state": "incomplete", "reason": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        verified = [entry for target in targets.find(snapshot) for entry in target.verify()]
        problems = [f"{name}/{entry.variant}: {line}" for entry in verified for line in entry.problems]
        variants = [entry.variant for entry in verified if (entry.path / "metadata.json").exists()]
        return {
            "state": "damaged" if problems else "complete",
            "commit": snapshot.name,
            "problems": problems,
            "decisions": [asdict(decision) for decision in machines.decide(variants, machine)],
        }
    except (OSError, ValueError, BundleError) as error:
        return {"state": "unreadable", "reason": f"{type(error).__name__}: {error}"}


def _offline(repo_id: str, folder: Path) -> Path:
    """Return the folder that `kernels` would load from."""
    from huggingface_hub import HfApi
    from kernels._versions import resolve_version_spec_as_ref
    from kernels.resolver import _BYTECODE_IGNORE_PATTERNS

    from kernels_ext_npu import sources
    from kernels_ext_npu.distribution import published

    commit = resolve_version_spec_as_ref(repo_id, sources.VERSION, local_files_only=True).target_commit
    found = HfApi().snapshot_download(
        repo_id,
        repo_type=published.KERNEL,
        revision=commit,
        cache_dir=folder,
        ignore_patterns=_BYTECODE_IGNORE_PATTERNS,
        local_files_only=True,
    )
    return Path(str(found)).resolve()
