"""What a bundle may be: the bytes that its content makes, and nothing else."""

import hashlib
import json
import os
import stat
import zipfile
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest

from kernels_ext_npu.distribution import bundle_archive
from kernels_ext_npu.distribution.bundle_archive import MANIFEST, BundleError, KernelRepository

SMALL = [
    KernelRepository("A", 1, {"build/torch-npu/__init__.py": b"x = 1\n", "build/torch-npu/metadata.json": b"{}"}),
    KernelRepository("B", 1, {"README.md": b"", ".gitattributes": b"*.so"}, hub_commit="0123456789" * 4),
]
PACKED = bundle_archive.pack(SMALL)

Members = list[tuple[str, bytes]]


def read(data: bytes, folder: Path) -> list[KernelRepository]:
    path = folder / "bundle.zip"
    path.write_bytes(data)
    return bundle_archive.unpack(path)


def refusal(data: bytes, folder: Path) -> str:
    """Return what is said to an archive that is no bundle."""
    with pytest.raises(BundleError) as refused:
        read(data, folder)
    assert str(refused.value).startswith(f"{folder}/bundle.zip: ")
    return str(refused.value)


def members(data: bytes) -> Members:
    with zipfile.ZipFile(BytesIO(data)) as archive:
        return [(name, archive.read(name)) for name in archive.namelist()]


def zipped(content: Members, **options: int) -> bytes:
    """As a bundle is written, so that only what is meant to be wrong is."""
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w", **options) as archive:
        for name, data in content:
            entry = zipfile.ZipInfo(name)
            entry.compress_type = options.get("compression", zipfile.ZIP_STORED)
            entry.external_attr = (stat.S_IFREG | 0o644) << 16
            archive.writestr(entry, data)
    return buffer.getvalue()


def promised(content: dict[str, bytes]) -> Members:
    """What these files are in an archive: a manifest, and contents under their sha256."""
    repositories: dict[str, dict[str, bytes]] = {}
    for name, data in content.items():
        repository, _, path = name.partition("/")
        repositories.setdefault(repository, {})[path] = data
    made = [KernelRepository(name, 1, files) for name, files in repositories.items()]
    held = {f"contents/{hashlib.sha256(data).hexdigest()}": data for data in content.values()}
    return [(MANIFEST, bundle_archive._manifest(made)), *held.items()]


def test_the_format_does_not_drift() -> None:
    """Other releases of Python and of this project write the same bytes: a bundle is compared by its sha256."""
    shuffled = [replace(each, files=dict(reversed(each.files.items()))) for each in reversed(SMALL)]
    for repositories in (SMALL, shuffled):
        written = hashlib.sha256(bundle_archive.pack(repositories)).hexdigest()
        assert written == "34e63acd58eb4f171c38cb2910c6ef3324b235a454378e3b0d2f2e5b47e68e2e"


def test_a_small_bundle_is_refused_wherever_it_is_cut_and_whichever_byte_changes(tmp_path) -> None:
    assert read(PACKED, tmp_path) == SMALL
    for position, byte in enumerate(PACKED):
        changed = bytes([byte ^ (1 + position % 255)])
        for damaged in (PACKED[:position], PACKED[:position] + changed + PACKED[position + 1 :]):
            assert refusal(damaged, tmp_path)


FIRST = "A/build/torch-npu/__init__.py"
FORGED = {
    "../escape.py": "'../escape.py' is not a path that a bundle may hold",
    "A/../../escape.py": "'A/../../escape.py' is not a path",
    "/tmp/escape.py": "'/tmp/escape.py' is not a path",
    "A//escape.py": "'A//escape.py' is not a path",
    "A/./escape.py": "'A/./escape.py' is not a path",
    "A/folder/": "'A/folder/' is not a path",
    "A/b\\..\\escape.py": "is not a path",
    "C:/escape.py": "is not a path",
    "A/\u202efdp.py": "is not a path",
    f"{FIRST}/below.py": f"'{FIRST}/below.py' lies below a file",
}
ADDED = "the archive is not the one that its content makes: something was added, changed or packed anew"


@pytest.mark.parametrize("name", FORGED)
def test_a_path_that_no_bundle_may_hold_is_refused(tmp_path: Path, name: str) -> None:
    small = {f"{each.name}/{path}": data for each in SMALL for path, data in each.files.items()}
    assert FORGED[name] in refusal(zipped(promised(small | {name: b""})), tmp_path)


def test_much_of_little_is_refused(tmp_path: Path, monkeypatch) -> None:
    """A manifest that names one content for many files."""
    many = {f"A/{number:03}": bytes(4096) for number in range(200)}
    archive = zipped(promised(many))
    assert len(archive) < 2**16
    monkeypatch.setattr(bundle_archive, "LARGEST", 2**16)
    assert "its files have 819200 bytes" in refusal(archive, tmp_path)


def test_what_its_content_does_not_make_is_refused(tmp_path: Path) -> None:
    """Whatever it is that was added or packed anew: an archive is compared with the one that its content makes."""
    others = sorted(members(PACKED)), [*members(PACKED), ("../escape.py", b"import os")]
    for other in (*map(zipped, others), b"#!/bin/sh\n" + PACKED):
        assert ADDED in refusal(other, tmp_path)


def test_a_decompression_bomb_is_refused_unopened(tmp_path: Path, monkeypatch) -> None:
    bomb = zipped([(FIRST, bytes(10 * 2**20))], compression=zipfile.ZIP_LZMA)
    assert len(bomb) < 2**15
    monkeypatch.setattr(zipfile.ZipFile, "open", None)
    assert "compressed" in refusal(bomb, tmp_path)


def test_files_that_share_bytes_of_the_archive_are_refused(tmp_path: Path) -> None:
    """The other way to make much of little: every entry of the directory points to the same data."""
    names = [f"A/{number:03}" for number in range(200)]
    data = bytearray(zipped([(name, bytes(4096) if name == names[0] else b"") for name in names]))
    end = zipfile.ZipFile(BytesIO(data)).start_dir
    size = (4096).to_bytes(4, "little")
    for _ in names:
        name_length = int.from_bytes(data[end + 28 : end + 30], "little")
        data[end + 20 : end + 28] = size * 2
        data[end + 42 : end + 46] = bytes(4)
        end += 46 + name_length
    assert "larger than the archive" in refusal(bytes(data), tmp_path)


def test_what_is_too_large_is_refused_unread(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "bundle.zip"
    with path.open("wb") as file:
        os.truncate(file.fileno(), bundle_archive.LARGEST + 1)
    monkeypatch.setattr(Path, "read_bytes", None)
    with pytest.raises(BundleError, match=f"{bundle_archive.LARGEST + 1} bytes, and a bundle has at most"):
        bundle_archive.unpack(path)
    monkeypatch.setattr(bundle_archive, "LARGEST", 10)
    with pytest.raises(BundleError, match="and those of a bundle at most 10"):
        bundle_archive.pack(SMALL)


def test_missing_and_changed_files_are_all_named(tmp_path: Path) -> None:
    first, gone = SMALL[0].files["build/torch-npu/__init__.py"], SMALL[1].files["README.md"]
    content = [(name, data) for name, data in members(PACKED) if data != gone]
    forged = [(name, b"import os" if data == first else data) for name, data in content]
    changed, missing = refusal(zipped(forged), tmp_path).splitlines()
    digest = hashlib.sha256(b"import os").hexdigest()
    assert changed == f"{tmp_path}/bundle.zip: {FIRST} is not what the manifest says: its sha256 is {digest}"
    assert missing == f"{tmp_path}/bundle.zip: B/README.md is missing"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.update(format=1), "its format is 1, and this release reads 2: make the bundle again"),
        (lambda m: m.update(format=3), "its format is 3, and this release reads 2: install a newer one"),
        (lambda m: m.pop("format"), "not the manifest of a bundle: KeyError: 'format'"),
        (lambda m: m.update(repositories=[]), "not the manifest of a bundle"),
        (lambda m: m["repositories"]["A"].pop("files"), "not the manifest of a bundle"),
        (lambda m: m["repositories"]["A"].update(version="1"), "A has the version '1'"),
        (lambda m: m["repositories"]["A"].update(version=True), "A has the version True"),
        (lambda m: m["repositories"]["A"].update({"hub-commit": "main"}), "A has the commit 'main'"),
        (lambda m: m["repositories"]["A"].update({"hub-commit": "../" * 13 + "x"}), "A has the commit"),
        (
            lambda m: m["repositories"].update({"..": m["repositories"].pop("A")}),
            "'../build/torch-npu/__init__.py' is not a path",
        ),
        (lambda m: m["repositories"]["A"]["files"].clear(), "something was added"),
        (lambda m: m.update(note="hello"), "something was added"),
    ],
)
def test_a_wrong_manifest_is_refused(tmp_path: Path, change, words: str) -> None:
    manifest = json.loads(dict(members(PACKED))[MANIFEST])
    change(manifest)
    written = (json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode()
    forged = [(name, written if name == MANIFEST else data) for name, data in members(PACKED)]
    assert words in refusal(zipped(forged), tmp_path)


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"{", b"\xff", b"[" * 100_000, b'{"format": 1e999}', None])
def test_what_is_no_manifest_is_refused(tmp_path: Path, content: bytes | None) -> None:
    forged = [(name, content if name == MANIFEST else data) for name, data in members(PACKED)]
    assert refusal(zipped([(name, data) for name, data in forged if data is not None]), tmp_path)
