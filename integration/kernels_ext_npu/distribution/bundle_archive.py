"""The file format of a bundle: kernel repositories in a zip archive, with a manifest of every file's sha256.

Variants share nearly all of their files, so each content is there once, under its sha256. Nothing is compressed, dated
or ordered by chance: the same content gives the same bytes on every machine. What is read must be, to the byte, what
would be written: so whatever else an archive may hold, links or names that are there twice, is refused at the end.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
import struct
import zipfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

from kernels_ext_npu.environment import RefusedError

FORMAT = 2
MANIFEST = "manifest.json"
LARGEST = 256 * 2**20  # bytes; a repository takes about four hundred thousand

_COMMIT = re.compile(r"[0-9a-f]{40}")
_BROKEN = (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, EOFError, OSError, struct.error)


class BundleError(RefusedError):
    """A bundle was not made or not installed. The message gives every reason, a line each."""

    code = 1


@dataclass(frozen=True)
class KernelRepository:
    """One version of a kernel repository: what its branch on the Hub holds, or would hold."""

    name: str
    version: int
    files: dict[str, bytes]  # path in the repository -> content
    hub_commit: str | None = None  # of a clone there is none

    @property
    def commit(self) -> str:
        """The commit that the Hub has for it, or else one that follows from the content."""
        digests = {path: _digest(content) for path, content in self.files.items()}
        content = json.dumps([self.name, self.version, digests], sort_keys=True)
        return self.hub_commit or hashlib.sha256(content.encode()).hexdigest()[:40]


def pack(repositories: list[KernelRepository]) -> bytes:
    """Return the bytes of the bundle that holds these repositories; refuse paths that none can hold, and too much."""
    files = {f"{each.name}/{path}": content for each in repositories for path, content in each.files.items()}
    refuse(_unfit({path: len(content) for path, content in files.items()}))
    members = {_place(_digest(content)): content for content in files.values()}
    return _zip(members | {MANIFEST: _manifest(repositories)})


def unpack(archive: Path) -> list[KernelRepository]:
    """Read the repositories in a bundle into memory, after every check that the archive itself allows."""
    if not archive.is_file():
        raise BundleError(f"{archive}: there is no such file")
    if archive.stat().st_size > LARGEST:
        raise BundleError(f"{archive}: {archive.stat().st_size} bytes, and a bundle has at most {LARGEST}")
    try:
        data = archive.read_bytes()
    except OSError as error:
        raise BundleError(f"{archive} cannot be read: {error.strerror}") from error
    try:
        with zipfile.ZipFile(BytesIO(data)) as opened:
            entries = opened.infolist()
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):  # whose sizes may be a lie
                raise BundleError(f"{archive}: its files are compressed, as those of a bundle are not")
            if sum(entry.file_size for entry in entries) > len(data):
                raise BundleError(f"{archive}: its files would be larger than the archive, so that it is no bundle")
            members = {name: opened.read(name) for name in opened.namelist()}
    except _BROKEN as error:
        raise BundleError(f"{archive}: not a bundle, or cut short or changed on its way: {error}") from error
    repositories, problems = _read(members)
    if not problems and pack(repositories) != data:
        problems = ["the archive is not the one that its content makes: something was added, changed or packed anew"]
    refuse([f"{archive}: {problem}" for problem in problems])
    return repositories


def refuse(problems: list[str]) -> None:
    """Raise BundleError with these reasons, if there are any."""
    if problems:
        raise BundleError("\n".join(problems))


def _place(digest: str) -> str:
    return f"contents/{digest}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _manifest(repositories: list[KernelRepository]) -> bytes:
    content = {
        "format": FORMAT,
        "repositories": {
            repository.name: {
                "version": repository.version,
                "hub-commit": repository.hub_commit,
                "files": {
                    path: {"sha256": _digest(content), "size": len(content)}
                    for path, content in repository.files.items()
                },
            }
            for repository in repositories
        },
    }
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()


def _zip(members: dict[str, bytes]) -> bytes:
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in sorted(members, key=lambda name: (name != MANIFEST, name)):
            info = zipfile.ZipInfo(name)  # of 1980
            info.create_system = 3  # Unix, wherever it is made
            info.external_attr = (stat.S_IFREG | 0o644) << 16
            archive.writestr(info, members[name])
    return buffer.getvalue()


def _unfit(sizes: dict[str, int]) -> list[str]:
    """Name what could be written outside the folder that it is meant for, or cannot be written at all, and too much."""
    total = sum(sizes.values())
    problems = [f"its files have {total} bytes, and those of a bundle at most {LARGEST}"] if total > LARGEST else []
    for name in sizes:
        parts = name.split("/")
        plain = name.isascii() and name.isprintable() and {"\\", ":"}.isdisjoint(name)
        if not plain or not {"", ".", ".."}.isdisjoint(parts):
            problems.append(f"{name!r} is not a path that a bundle may hold")
        problems += [f"{name!r} lies below a file" for parent in PurePosixPath(name).parents if str(parent) in sizes]
    return problems


def _read(members: dict[str, bytes]) -> tuple[list[KernelRepository], list[str]]:
    """Read what the manifest promises, and find how the contents differ from that."""
    try:
        manifest = json.loads(members.pop(MANIFEST))
        if (layout := manifest["format"]) != FORMAT:
            older = type(layout) is int and layout < FORMAT
            what = "make the bundle again" if older else "install a newer one"
            return [], [f"its format is {layout}, and this release reads {FORMAT}: {what}"]
        promised = {
            f"{name}/{path}": (entry["sha256"], entry["size"])
            for name, repository in manifest["repositories"].items()
            for path, entry in repository["files"].items()
        }
        problems = _unfit({path: size for path, (_, size) in promised.items()})
        places = {path: _place(digest) for path, (digest, _) in promised.items()}
        repositories = [
            _repository(name, entry, {path: members.get(places[f"{name}/{path}"], b"") for path in entry["files"]})
            for name, entry in manifest["repositories"].items()
        ]
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        return [], [f"{MANIFEST} is missing or is not the manifest of a bundle: {type(error).__name__}: {error}"]
    problems += [f"{path} is missing" for path, place in places.items() if place not in members]
    digests = {place: (_digest(content), len(content)) for place, content in members.items()}
    for path, place in places.items():
        if place in digests and digests[place] != promised[path]:
            problems.append(f"{path} is not what the manifest says: its sha256 is {digests[place][0]}")
    return repositories, sorted(problems)


def _repository(name: str, entry: dict[str, Any], files: dict[str, bytes]) -> KernelRepository:
    version, commit = entry["version"], entry["hub-commit"]
    if type(version) is not int or version < 0:
        raise ValueError(f"{name} has the version {version!r}")
    if commit is not None and not _COMMIT.fullmatch(commit):
        raise ValueError(f"{name} has the commit {commit!r}")
    return KernelRepository(name, version, files, commit)
