"""Plan what would change on a branch of the Hub, by the hashes of contents."""

from __future__ import annotations

from dataclasses import dataclass, field

from huggingface_hub import CommitOperationAdd, CommitOperationDelete

from publishing.remote import Content, Remote


@dataclass(frozen=True)
class Wanted:
    """Say what a branch is to hold.

    Attributes:
        files: path -> content.
        owned: folders that hold these files and no others, each with its slash at the end.
        pruned: folders that are to go.
    """

    branch: str
    files: dict[str, bytes]
    owned: tuple[str, ...] = ()
    pruned: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Lead from the tree at `parent` to what is wanted; `parent` is None where the repository is still to be made.

    A branch that is not there yet starts from main, and keeps nothing of it.
    """

    wanted: Wanted
    parent: str | None
    exists: bool
    before: dict[str, Content]
    added: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)  # what others published

    @property
    def branch(self) -> str:
        return self.wanted.branch

    @property
    def nothing_to_do(self) -> bool:
        return self.exists and not (self.added or self.changed or self.removed)

    def operations(self) -> list[CommitOperationAdd | CommitOperationDelete]:
        files = self.wanted.files
        return [
            *(CommitOperationAdd(path, files[path]) for path in (*self.added, *self.changed)),
            *(CommitOperationDelete(path, is_folder=False) for path in self.removed),
        ]

    def misfits(self, tree: dict[str, Content]) -> list[str]:
        """List how a tree differs from the one that the plan leads to, a line a file."""
        kept = {path: content for path, content in self.before.items() if path not in self.removed}
        wanted = self.wanted.files
        lines = [f"{path}: missing" for path in (kept.keys() | wanted.keys()) - tree.keys()]
        lines += [f"{path}: not in the plan" for path in tree.keys() - kept.keys() - wanted.keys()]
        lines += [
            f"{path}: another content"
            for path in wanted.keys() & tree.keys()
            if not tree[path].has_content(wanted[path])
        ]
        others = kept.keys() & tree.keys() - wanted.keys()
        lines += [f"{path}: changed, though it was to be left" for path in others if tree[path] != kept[path]]
        return sorted(lines)

    def to_json(self) -> dict:
        return {
            "exists": self.exists,
            "parent": self.parent,
            **{kind: getattr(self, kind) for kind in ("added", "changed", "removed", "unchanged", "left")},
        }


def make(remote: Remote, wanted: Wanted) -> Plan:
    """Compare a branch with what is wanted; reads, and writes nothing."""
    heads = remote.heads()
    if heads is None:
        return Plan(wanted, None, False, {}, added=sorted(wanted.files))
    exists = wanted.branch in heads
    parent = heads[wanted.branch if exists else "main"]
    return compare(wanted, parent, exists, remote.tree(parent))


def compare(wanted: Wanted, parent: str, exists: bool, tree: dict[str, Content]) -> Plan:
    """Plan for a branch whose tree is known."""
    files = wanted.files
    folders = (*wanted.owned, *wanted.pruned)
    return Plan(
        wanted,
        parent,
        exists,
        tree,
        added=sorted(files.keys() - tree.keys()),
        changed=sorted(path for path in files.keys() & tree.keys() if not tree[path].has_content(files[path])),
        removed=sorted(path for path in tree.keys() - files.keys() if not exists or path.startswith(folders)),
        unchanged=sorted(path for path in files.keys() & tree.keys() if tree[path].has_content(files[path])),
        left=sorted(path for path in tree.keys() - files.keys() if exists and not path.startswith(folders)),
    )
