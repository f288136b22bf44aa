"""What an installed bundle changes in the Hub's cache, and that it is all of it or nothing."""

import json
import os
import shutil
import stat
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import build
import pytest
from typer.testing import CliRunner

from kernels_ext_npu import catalogue
from kernels_ext_npu.cli import app
from kernels_ext_npu.distribution import bundle_archive, bundles, sources
from kernels_ext_npu.distribution.bundle_archive import BundleError, KernelRepository
from kernels_ext_npu.distribution.variants import METADATA, names
from tests.support import bundle_faults
from tests.support.bundle_faults import NEW, OLD

HOME = "kernels--kernels-ext-npu--A"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_installing_again_changes_nothing(cache: Path) -> None:
    bundles.put_into_cache(NEW, cache)
    (cache / HOME / "snapshots" / NEW[0].commit / "build" / "__pycache__").mkdir()
    (cache / HOME / "snapshots" / NEW[0].commit / "build" / "__pycache__" / "a.cpython-311.pyc").write_bytes(b"")
    before = content(cache)
    assert [place.before for place in bundles.put_into_cache(NEW, cache)] == [each.commit for each in NEW]
    assert content(cache) == before


def test_other_snapshots_and_versions_stay(cache: Path) -> None:
    bundles.put_into_cache(OLD, cache)
    (cache / HOME / "refs" / "v2").write_text("2" * 40)
    before = content(cache)
    bundles.put_into_cache(NEW, cache)
    after = content(cache)
    refs = {f"kernels--kernels-ext-npu--{each.name}/refs/v1" for each in NEW}
    assert {path for path in before if after[path] != before[path]} == refs
    bundles.put_into_cache(OLD, cache)  # and back
    assert {path: after[path] for path in after if path not in refs}.items() <= content(cache).items()
    assert {path: content(cache)[path] for path in refs} == {path: before[path] for path in refs}


def test_a_download_of_one_variant_is_completed(cache: Path) -> None:
    """As `kernels` leaves it: files that are links to blobs, and a list of those that there should be."""
    repository = NEW[0]
    first = next(iter(repository.files))
    pointer = cache / HOME / "snapshots" / repository.commit / first
    blob = cache / HOME / "blobs" / "0123"
    blob.parent.mkdir(parents=True)
    pointer.parent.mkdir(parents=True)
    blob.write_bytes(repository.files[first])
    pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    bundles.put_into_cache(NEW, cache)
    assert pointer.is_symlink()
    assert content(cache / HOME / "snapshots" / repository.commit) == repository.files
    blob.unlink()  # as somebody does who wants the space
    bundles.put_into_cache(NEW, cache)
    assert content(cache / HOME / "snapshots" / repository.commit) == repository.files


@pytest.mark.parametrize("change", ["changed", "extra"])
def test_other_content_under_the_same_commit_is_refused(cache: Path, change: str) -> None:
    bundles.put_into_cache(OLD, cache)
    snapshot = cache / HOME / "snapshots" / NEW[0].commit
    path = snapshot / (next(iter(NEW[0].files)) if change == "changed" else "build/torch29-cann85-aarch64-linux/x.py")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"import os")
    before = content(cache)
    with pytest.raises(BundleError) as refusal:
        bundles.put_into_cache(NEW, cache)
    what = "differs from the one in the bundle" if change == "changed" else "is not in the bundle"
    assert str(refusal.value) == f"{path} {what}, and belongs to the same commit: remove {snapshot} and install again"
    assert content(cache) == before
    shutil.rmtree(snapshot)
    bundles.put_into_cache(NEW, cache)


def test_a_model_of_the_same_name_that_hides_the_kernel_is_refused(cache: Path) -> None:
    """Old releases of kernels took models for kernels; the present one looks there too, and first."""
    ref = cache / "models--kernels-ext-npu--A" / "refs" / "v1"
    ref.parent.mkdir(parents=True)
    ref.write_text("1" * 40)
    with pytest.raises(BundleError, match=rf"{ref} would be taken .* remove {ref.parent.parent}, left by an"):
        bundles.put_into_cache(NEW, cache)
    assert not (cache / HOME).exists()


def test_others_can_read_a_shared_cache(cache: Path) -> None:
    before = os.umask(0o022)
    try:
        bundles.put_into_cache(NEW, cache)
    finally:
        os.umask(before)
    for path in cache.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o755 if path.is_dir() else 0o644), path


def test_several_installations_at_once(cache: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        for made in [pool.submit(bundles.put_into_cache, NEW, cache) for _ in range(8)]:
            made.result()
    assert bundle_faults.states(cache) == ["new", "new"]
    assert {path.name for path in cache.glob("*/*")} == {"refs", "snapshots"}


@pytest.mark.parametrize(
    ("how", "before"),
    [("an error", "none"), ("a kill", "none"), ("an error", "old"), ("an interruption", "old"), ("a kill", "old")],
)
def test_a_failure_at_any_step_leaves_the_old_state(run_python, tmp_path: Path, how: str, before: str) -> None:
    """A step opens a file, renames or removes it, or makes a folder; a kill may come between two repositories."""
    steps = int(run_python(None, bundle_faults.__file__, how, before, str(tmp_path)).stdout)
    assert steps >= 30


@pytest.mark.parametrize("value", ["", "~/kernels"])
def test_a_cache_that_kernels_reads_in_two_places_is_refused(monkeypatch, archive: Path, value: str) -> None:
    monkeypatch.setenv("KERNELS_CACHE", value)
    with pytest.raises(BundleError, match=f"KERNELS_CACHE is '{value}': .* give the whole path"):
        bundles.install(archive)


def test_a_manifest_does_not_help_against_the_metadata(monkeypatch, tmp_path: Path, archive: Path) -> None:
    """Of variants of a repository, each of which has another fault, in a bundle whose manifest knows them."""
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path / "cache"))
    (old,) = (each for each in bundle_archive.unpack(archive) if each.name == "RMSNorm")
    others = [each for each in bundle_archive.unpack(archive) if each.name != "RMSNorm"]
    variants, files = names(build.ROOT), dict(old.files)
    files[f"build/{variants[0]}/layers.py"] += b"#"
    metadata = f"build/{variants[1]}/{METADATA}"
    files[metadata] = json.dumps(json.loads(files[metadata]) | {"version": 2}).encode()
    forged = tmp_path / "forged.zip"
    forged.write_bytes(bundle_archive.pack([*others, KernelRepository(old.name, old.version, files, old.hub_commit)]))
    with pytest.raises(BundleError) as refusal:
        bundles.install(forged)
    lines = str(refusal.value).splitlines()
    for variant, words in zip(variants, ("layers.py: changed, its digest differs", "its version is 2, not 1")):
        assert any(line.startswith(f"{forged}: RMSNorm/build/{variant}: ") and words in line for line in lines), words
    assert not (tmp_path / "cache").exists()


def test_a_bundle_without_all_repositories_is_refused(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path / "cache"))
    known, other = catalogue.REPOSITORIES, sorted(["Other", *catalogue.REPOSITORIES])
    empty, later = ([KernelRepository(name, version, {"README.md": b""}) for name in known] for version in (1, 2))
    for repositories, words in [
        (empty[1:], f"it holds {', '.join(known[1:])}, and this release needs {', '.join(known)}"),
        ([*empty, KernelRepository("Other", 1, {"a": b""})], f"{', '.join(other)}, and this release needs"),
        ([], "it holds nothing"),
        (empty, "SwiGLU holds no variants"),
        (later, "SwiGLU has version 2, not 1"),
    ]:
        (tmp_path / "partial.zip").write_bytes(bundle_archive.pack(repositories))
        with pytest.raises(BundleError, match=words):
            bundles.install(tmp_path / "partial.zip")
    assert not (tmp_path / "cache").exists()


def test_a_bundle_of_a_clone_holds_what_its_tree_leaves_out_and_each_content_once(archive: Path) -> None:
    for repository in bundle_archive.unpack(archive):
        content = build.render(build.ROOT / repository.name, names(build.ROOT))
        assert repository.files == {f"build/{path}": data for path, data in content.items()}
    assert archive.stat().st_size < 2 * 2**20


def test_a_clone_gives_the_bytes_of_the_package_and_is_checked_before(tmp_path: Path, archive: Path) -> None:
    clone = tmp_path / "clone"
    for name in catalogue.REPOSITORIES:
        shutil.copytree(sources.root("bundled") / name / "build", clone / name / "build")
    shutil.copy(sources.root("bundled") / "variants.toml", clone)
    bundles.write(tmp_path / "clone.zip", clone)
    assert (tmp_path / "clone.zip").read_bytes() == archive.read_bytes()
    (clone / "FusedMoE" / "build" / "torch-npu" / "metadata.json").rename(clone / "metadata.json")
    with pytest.raises(BundleError, match=r"FusedMoE/build/torch-npu/metadata.json is not there or cannot be read"):
        bundles.write(tmp_path / "wrong.zip", clone)
    (clone / "metadata.json").rename(clone / "FusedMoE" / "build" / "torch-npu" / "metadata.json")
    changed = clone / "RoPE" / "build" / "torch-npu" / "layers.py"
    changed.write_text("import os")
    output = tmp_path / "wrong.zip"
    with pytest.raises(BundleError, match=r"RoPE/build/torch-npu: layers.py: changed"):
        bundles.write(output, clone)
    changed.unlink()
    changed.symlink_to("/etc/passwd")
    with pytest.raises(BundleError, match=f"{changed} is a link"):
        bundles.write(output, clone)
    assert {path.name for path in tmp_path.iterdir()} == {"clone", "clone.zip"}


def test_the_command_refuses_in_sentences(monkeypatch, tmp_path: Path, archive: Path) -> None:
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cut.zip").write_bytes(archive.read_bytes()[:-100])
    with zipfile.ZipFile(tmp_path / "unsafe.zip", "w") as unsafe:
        unsafe.writestr("../escape.py", b"import os")
    for arguments, words in [
        (["--install", str(tmp_path / "missing.zip")], f"{tmp_path}/missing.zip: there is no such file"),
        (["--install", "/dev/zero"], "/dev/zero: there is no such file"),
        (["--install", str(tmp_path / "cut.zip")], f"{tmp_path}/cut.zip: not a bundle, or cut short"),
        (["--install", str(tmp_path / "unsafe.zip")], f"{tmp_path}/unsafe.zip: manifest.json is missing"),
        (
            ["--output", str(tmp_path / "a.zip"), "--source", "/nowhere"],
            f"/nowhere has no {catalogue.REPOSITORIES[0]}/build",
        ),
        (["--output", str(tmp_path / "none" / "a.zip")], "is a folder, or lies in one that does not exist"),
        (["--output", str(tmp_path)], "is a folder, or lies in one that does not exist"),
    ]:
        result = CliRunner().invoke(app, ["bundle", *arguments])
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith("kernels-ext-npu: ")
        assert words in result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"cut.zip", "unsafe.zip"}
    for arguments in ([], ["--output", "a.zip", "--install", "b.zip"]):
        assert CliRunner().invoke(app, ["bundle", *arguments]).exit_code == 2
