"""All variants as files, wherever they are needed: made of the links of the tree, and of what it leaves out."""

import json
import sys
from pathlib import Path

import build
import pytest

from kernels_ext_npu.distribution.variants import all_variants, names, repositories, write
from kernels_ext_npu.distribution.verification import verify_build

REPOSITORIES = repositories(build.ROOT)
NAMES = names(build.ROOT)


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.mark.parametrize("repository", REPOSITORIES, ids=lambda path: path.name)
def test_all_variants_are_files_that_the_source_gives(repository: Path, whole: Path) -> None:
    assert all_variants(repository) == files(whole / repository.name / "build") == build.render(repository, NAMES)
    assert not [path for path in (whole / repository.name).rglob("*") if path.is_symlink()]
    verified = verify_build(whole / repository.name / "build")
    assert {entry.variant: entry.problems for entry in verified} == {name: [] for name in NAMES}


def test_bytecode_is_no_variant(norm: Path) -> None:
    """As git leaves it where it takes away the files of a variant that has run."""
    before = all_variants(norm)
    bytecode = norm / "build" / "torch29-cxx11-cann85-aarch64-linux" / "__pycache__" / "layers.cpython-311.pyc"
    bytecode.parent.mkdir(parents=True)
    bytecode.write_bytes(b"")
    assert all_variants(norm) == before


def test_a_variant_that_the_tree_holds_as_files_stays_as_it_is(norm: Path) -> None:
    variant = norm / "build" / "torch29-cxx11-cann85-aarch64-linux"
    write({"metadata.json": b"{}"}, variant)
    found = all_variants(norm)
    assert [path for path in found if path.startswith(variant.name)] == [f"{variant.name}/metadata.json"]


def test_a_repository_that_was_not_built_is_named(norm: Path) -> None:
    metadata = norm / "build" / "torch-universal" / "metadata.json"
    metadata.unlink()
    with pytest.raises(ValueError, match=f"{metadata} is not there: make build"):
        all_variants(norm)


def test_it_is_taken_on_its_machine(run_forked, whole: Path, tmp_path: Path) -> None:
    """By a process that says to be on torch 2.9 and CANN 8.5, of a variant that the tree does not hold."""
    (tmp_path / "ascend_toolkit_install.info").write_text("version=8.5.0\n")
    code = f"""
import softnpu, json, os, pathlib, platform, torch
os.environ["ASCEND_HOME_PATH"] = {str(tmp_path)!r}
platform.machine = lambda: "aarch64"
torch.__version__ = "2.9.0"
from kernels import get_local_kernel
for root in json.loads({json.dumps(json.dumps([str(whole), str(build.ROOT)]))}):
    kernel = get_local_kernel(pathlib.Path(root, "RMSNorm"))
    assert kernel.rms_norm(torch.ones(2, 8, device="npu"), None, 0.0).sum().item() == 16
    print(pathlib.Path(kernel.__file__).parent)
"""
    loaded = run_forked(code).stdout.splitlines()
    assert loaded == [
        f"{whole}/RMSNorm/build/torch29-cxx11-cann85-aarch64-linux",
        f"{build.ROOT}/RMSNorm/build/torch-npu",  # a clone has the same files under this name
    ]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is not in the standard library")
def test_they_are_made_without_what_the_package_needs(run_python, tmp_path: Path) -> None:
    """As where a wheel is built: with -S there is only the standard library."""
    code = """
import pathlib, sys
from kernels_ext_npu.distribution.variants import all_variants, write
write(all_variants(pathlib.Path(sys.argv[1])), pathlib.Path(sys.argv[2]))
"""
    run_python(None, "-S", "-c", code, str(build.ROOT / "RoPE"), str(tmp_path / "build"))
    assert files(tmp_path / "build") == build.render(build.ROOT / "RoPE", NAMES)
