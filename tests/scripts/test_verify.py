"""What verify says of folders, caches and the Hub: a changed, missing or extra file is named."""

import json
from pathlib import Path

import build
import pytest
from huggingface_hub import HfApi

from kernels_ext_npu.distribution import targets, variant_choice
from kernels_ext_npu.distribution.published import download, head
from kernels_ext_npu.distribution.verification import verify_build, verify_variant
from kernels_ext_npu.environment import RefusedError
from tests.localhub import LocalHub
from tests.support.tiny import REPO, STRICT, Clone

COMMAND = "from kernels_ext_npu.cli import app; app()"


def problems(path: Path) -> list[str]:
    return [line for found in targets.verify_at(path).values() for entry in found for line in entry.problems]


def flip(path: Path, at: int) -> None:
    """One bit of one byte."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.unlink()
    path.write_bytes(content)


# ---- folders ---------------------------------------------------------------------------------------------------------
def test_what_may_be_verified(clone: Clone, tmp_path: Path) -> None:
    folder = clone.repository / "build"
    for path, variants in ((clone.root, 3), (clone.repository, 3), (folder, 3), (folder / "torch-npu", 1)):
        assert sum(map(len, targets.verify_at(path).values())) == variants
    with pytest.raises(RefusedError, match="a clone of the project, a kernel repository"):
        targets.verify_at(tmp_path / "clone" / "Tiny" / "torch-ext")


def test_a_variant_that_is_a_link_is_verified_under_its_name() -> None:
    path = build.ROOT / "RMSNorm" / "build" / STRICT
    assert path.is_symlink()
    ((name, (found,)),) = targets.verify_at(path).items()
    assert (name, found.variant, found.problems) == (f"RMSNorm/{STRICT}", STRICT, [])


def test_a_flipped_byte_in_any_file_is_found(clone: Clone) -> None:
    """Every byte of the metadata, some of every other file."""
    variant = clone.repository / "build" / "torch-npu"
    for path in [path for path in variant.rglob("*") if path.is_file()]:
        content = path.read_bytes()
        step = 1 if path.name == "metadata.json" else max(1, len(content) // 7)
        for at in range(0, len(content), step):
            flip(path, at)
            found = verify_variant(variant).problems
            assert any(str(path.relative_to(variant)) in line for line in found), (path.name, at)
            path.write_bytes(content)
    assert not verify_variant(variant).problems


def test_changed_missing_and_extra_files_are_named(clone: Clone) -> None:
    folder = clone.repository / "build"
    variant = folder / "torch-npu"
    (folder / "notes.txt").write_text("")
    (folder / STRICT / "gone.py").symlink_to("nowhere")
    (variant / "layers.py").write_text("")
    (variant / "Tiny" / "__init__.py").unlink()
    (variant / "more.py").write_text("")
    (variant / "hidden.pyc").write_text("")
    found = {entry.variant: sorted(entry.problems) for entry in verify_build(folder)}
    assert found["notes.txt"] == ["notes.txt: a file where variants are"]
    assert "cannot be read" in found[STRICT][0]
    assert found["torch-npu"] == [
        "Tiny/__init__.py: missing",
        "hidden.pyc: bytecode without its source",
        "layers.py: changed, its digest differs",
        "more.py: not in the digest, an extra file",
    ]


def test_signatures_are_absent_or_left_to_kernels(clone: Clone) -> None:
    variant = clone.repository / "build" / "torch-npu"
    assert verify_variant(variant).signature == "absent"
    (variant / "metadata.json.sigstore").write_text("{}")
    found = verify_variant(variant)
    assert (found.signature, found.problems) == ("not checked: see kernels verify-signature", [])


# ---- caches and the Hub ----------------------------------------------------------------------------------------------
@pytest.fixture
def cache(publisher, localhub: LocalHub, tmp_path: Path) -> Path:
    """As after a download of version 1."""
    assert publisher().exit_code == 0
    HfApi(endpoint=localhub.url).snapshot_download(
        REPO, repo_type="kernel", revision="v1", cache_dir=tmp_path / "cache"
    )
    return tmp_path / "cache"


def test_a_flipped_byte_in_any_file_of_a_cache_is_found(cache: Path) -> None:
    assert problems(cache) == []
    blobs = sorted((cache / "kernels--kernels-ext-npu--Tiny" / "blobs").iterdir())
    assert len(blobs) == 4  # the variants share them
    for blob in blobs:
        content = blob.read_bytes()
        if content:
            flip(blob, len(content) // 2)
            assert any("changed since it was downloaded" in line for line in problems(cache)), blob
            blob.write_bytes(content)
        blob.rename(cache / "away")
        assert any("missing" in line for line in problems(cache))
        (cache / "away").rename(blob)
    assert problems(cache) == []


def test_a_flipped_byte_on_the_hub_is_found(publisher, localhub: LocalHub, tmp_path: Path) -> None:
    """Kept wrongly by the server, under the hash that it had, which other files may have too."""
    publisher()
    api = HfApi(endpoint=localhub.url)
    commit = head(api, REPO, 1)
    files = localhub.repository(REPO).commit("v1").files
    assert len(files) >= 5
    for number, path in enumerate(sorted(files)):
        content, same = files[path].content, [file for file in files.values() if file.id == files[path].id]
        half = len(content) // 2
        for file in same:
            file.content = content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]
        folder, differences = download(api, REPO, commit, tmp_path / str(number))
        for file in same:
            file.content = content
        assert f"{path}: differs from the file of the commit" in differences
        assert any(entry.problems for entry in verify_build(folder / "build"))


def test_a_description_that_is_none_is_refused() -> None:
    assert variant_choice.describe(None, None, None) is None
    with pytest.raises(ValueError, match="--cann eight: not a version; expected is one such as"):
        variant_choice.describe("2.8", "eight", "aarch64")


# ---- the command -----------------------------------------------------------------------------------------------------
def test_the_command_line(publisher, localhub: LocalHub, clone: Clone, run_forked, tmp_path: Path) -> None:
    publisher()
    environment = localhub.environment(tmp_path / "home")
    described = ("--torch", "2.8", "--cann", "8.2", "--arch", "aarch64")
    report = json.loads(run_forked(COMMAND, "verify", REPO, *described, "--json", **environment).stdout)[0]
    assert report["intact"]
    assert report["commit"] == localhub.repository(REPO).commit("v1").id
    taken = {machine: made[0]["variant"] for machine, made in report["machines"].items()}
    assert taken.pop("torch 2.8, CANN 8.2, aarch64") == STRICT
    assert list(taken.values()) == ["torch-npu"]
    assert "is not from a trusted publisher" in report["refusal"]
    assert f'trust_remote_code=["{REPO}"]' in report["refusal"]

    (clone.repository / "build" / "torch-npu" / "layers.py").write_text("")
    result = run_forked(COMMAND, "verify", str(clone.repository), check=False)
    assert result.returncode == 1
    assert "layers.py: changed, its digest differs" in result.stdout
    result = run_forked(COMMAND, "verify", REPO, "--version", "7", check=False, **environment)
    assert result.returncode == 2
    assert "its versions: v1" in result.stderr


def test_a_hub_that_cannot_be_asked_ends_with_2_and_a_sentence(localhub, run_forked, tmp_path: Path) -> None:
    localhub.faults.add("status", status=500, times=99)
    answering = localhub.environment(tmp_path / "home")
    asked = {"Connection refused": "http://127.0.0.1:9", f"{localhub.url} answers 500: it is overloaded": localhub.url}
    for said, endpoint in asked.items():
        result = run_forked(COMMAND, "verify", REPO, "--json", check=False, **answering | {"HF_ENDPOINT": endpoint})
        assert (result.returncode, result.stdout) == (2, "")
        (line,) = result.stderr.splitlines()
        assert line.startswith("kernels-ext-npu: ")
        assert said in line
