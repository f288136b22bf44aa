"""What is refused before the Hub is asked: each violation by name, and all of them at once."""

import json
import shutil
from pathlib import Path

import pytest

from kernels_ext_npu.distribution.variants import identity, render
from publishing import local, preflight
from publishing.remote import RefusedError
from tests.support.tiny import STRICT, Clone

LEFT_OUT = "torch28-cxx11-cann85-aarch64-linux"


def found(
    clone: Clone, *variants: str, version: int = 1, pruned: tuple[str, ...] = (), load: bool = False
) -> list[str]:
    return preflight.violations(local.find(str(clone.repository), variants, pruned), version, pruned, load)


def rewrite(variant: Path, **fields: object) -> None:
    """Metadata as if it had been built so, with the id that belongs to it."""
    metadata = json.loads((variant / "metadata.json").read_text()) | fields
    metadata["id"] = identity(metadata, variant.name)
    (variant / "metadata.json").write_bytes(render(metadata))


def test_a_built_repository_is_fine(clone: Clone) -> None:
    assert found(clone) == []


def unparsable_name(build: Path) -> str:
    shutil.copytree(build / "torch-npu", build / "torch99")
    return "torch99: kernels does not know such a variant"


def name_of_no_machine(build: Path) -> str:
    shutil.copytree(build / "torch-npu", build / "torch-cann")
    return "no Ascend machine takes a variant of this name"


def name_of_another_backend(build: Path) -> str:
    (build / STRICT).rename(build / "torch28-cxx11-cu128-x86_64-linux")
    return "the name is that of a variant for cuda"


def unparsable_metadata(build: Path) -> str:
    (build / "torch-npu" / "metadata.json").write_text('{"name": "Tiny"}')
    return "torch-npu/metadata.json: "


def missing_metadata(build: Path) -> str:
    (build / "torch-npu" / "metadata.json").unlink()
    return "torch-npu/metadata.json: missing"


def changed_file(build: Path) -> str:
    (build / "torch-npu" / "layers.py").write_text("")
    return "torch-npu/layers.py: changed, its digest differs"


def missing_file(build: Path) -> str:
    (build / "torch-npu" / "layers.py").unlink()
    return "torch-npu/layers.py: missing"


def extra_file(build: Path) -> str:
    (build / "torch-npu" / "extra.py").write_text("")
    return "torch-npu/extra.py: not in the digest, an extra file"


def other_version(build: Path) -> str:
    rewrite(build / STRICT, version=2)
    return f"{STRICT}/metadata.json: version 2 on the branch v1"


def other_backend(build: Path) -> str:
    rewrite(build / "torch-npu", backend={"type": "cuda"})
    return "torch-npu/metadata.json: the backend is cuda"


def uncommitted_changes(build: Path) -> str:
    kernel = {"commit": "0" * 40, "dirty": True}
    rewrite(build / "torch-npu", provenance={"kernel-builder": {"version": "0.17.2"}, "kernel": kernel})
    return "torch-npu/metadata.json: built from a tree with uncommitted changes"


def shared_id(build: Path) -> str:
    shutil.copy(build / "torch-npu" / "metadata.json", build / STRICT / "metadata.json")
    return "they would share modules"


def bytecode(build: Path) -> str:
    (build / "torch-npu" / "__pycache__").mkdir()
    (build / "torch-npu" / "__pycache__" / "layers.cpython-311.pyc").write_bytes(b"")
    return "torch-npu/__pycache__/layers.cpython-311.pyc: bytecode"


def link(build: Path) -> str:
    (build / "torch-npu" / "layers.py").unlink()
    (build / "torch-npu" / "layers.py").symlink_to(build / "torch-universal" / "layers.py")
    return "torch-npu/layers.py: a link"


def absolute_import(build: Path) -> str:
    (build / "torch-npu" / "layers.py").write_text("import torch\nfrom tiny.layers import Doubled\n")
    return "torch-npu/layers.py:2: an absolute import of tiny.layers"


def not_python(build: Path) -> str:
    (build / "torch-npu" / "layers.py").write_text("def\n")
    return "torch-npu/layers.py:1: not Python"


def card_without_front_matter(build: Path) -> str:
    (build.parent / "README.md").write_text("# Tiny\n")
    return "README.md: has no front matter"


def broken_card(build: Path) -> str:
    (build.parent / "README.md").write_text("---\nlicense: [\n---\n")
    return "README.md: the front matter cannot be read"


def card_of_another_license(build: Path) -> str:
    (build.parent / "README.md").write_text("---\nlibrary_name: kernels\nlicense: mit\n---\n")
    return "README.md: license is 'mit', build.toml says 'apache-2.0'"


def card_of_another_library(build: Path) -> str:
    (build.parent / "README.md").write_text("---\nlibrary_name: transformers\nlicense: apache-2.0\n---\n")
    return "README.md: library_name is 'transformers'"


def broken_build_file(build: Path) -> str:
    path = build.parent / "build.toml"
    path.write_text(path.read_text().replace("edition = 5", "edition = 99"))
    return "build.toml: "


VIOLATIONS = [
    unparsable_name,
    name_of_no_machine,
    name_of_another_backend,
    unparsable_metadata,
    missing_metadata,
    changed_file,
    missing_file,
    extra_file,
    other_version,
    other_backend,
    uncommitted_changes,
    shared_id,
    bytecode,
    link,
    absolute_import,
    not_python,
    card_without_front_matter,
    broken_card,
    card_of_another_license,
    card_of_another_library,
    broken_build_file,
]


@pytest.mark.parametrize("violate", VIOLATIONS, ids=lambda violate: violate.__name__)
def test_a_violation_is_named(clone: Clone, violate) -> None:
    expected = violate(clone.repository / "build")
    assert [line for line in found(clone) if expected in line], found(clone)


def test_all_violations_come_at_once(clone: Clone) -> None:
    together = [name_of_no_machine, changed_file, extra_file, other_version, bytecode, card_without_front_matter]
    expected = [violate(clone.repository / "build") for violate in together]
    lines = "\n".join(found(clone))
    assert [line for line in expected if line not in lines] == []


def test_only_the_chosen_variants_are_asked(clone: Clone) -> None:
    changed_file(clone.repository / "build")
    assert found(clone, STRICT) == []


def test_a_choice_that_cannot_be_met_is_named(clone: Clone) -> None:
    assert found(clone, "torch-xpu") == ["there is no variant torch-xpu in Tiny/build"]
    assert found(clone, STRICT, pruned=(STRICT,)) == [f"{STRICT} cannot be published and pruned at once"]
    with pytest.raises(
        local.NoRepositoryError,
        match="no kernel repository called Missing; there are Activation, CrossEntropy, FlashAttention, Fus",
    ):
        local.find("Missing")


def test_what_the_tree_leaves_out_is_checked_and_made_of_what_it_holds(clone: Clone) -> None:
    clone.rebuild(STRICT, LEFT_OUT)
    assert not (clone.repository / "build" / LEFT_OUT).exists()
    assert found(clone) == found(clone, LEFT_OUT) == []
    changed_file(clone.repository / "build")
    assert f"{LEFT_OUT}/layers.py: changed, its digest differs" in found(clone, LEFT_OUT)
    missing_metadata(clone.repository / "build")
    with pytest.raises(RefusedError, match=r"torch-npu/metadata.json is not there or cannot be read: make build"):
        found(clone, LEFT_OUT)


def test_variants_are_loaded_and_layers_obey_the_rules_of_kernels(clone: Clone) -> None:
    clone.write(
        "torch-ext/tiny/layers.py",
        "from torch import nn\n\n\n"
        "class Stateful(nn.Module):\n    def __init__(self):\n        super().__init__()\n\n\n"
        "class Grown(nn.Module):\n    scale = 2\n\n    def forward(self, x):\n        return x\n",
    )
    clone.write("torch-ext/tiny/__init__.py", 'from . import layers\n\n__all__ = ["layers", "doubled"]\n')
    clone.rebuild(STRICT)
    (clone.repository / "build" / "torch-universal" / "__init__.py").write_text("raise RuntimeError('as it is')\n")
    lines = found(clone, load=True)
    assert f"{STRICT}: __all__ names doubled, which is not there" in lines
    assert "torch-npu: the layer Stateful must not override nn.Module constructor." in lines
    assert "torch-npu: the layer Grown must not contain additional members compared to `Grown`." in lines
    assert "torch-universal: cannot be loaded: RuntimeError: as it is" in lines
    assert not list(clone.repository.rglob("__pycache__"))


def test_a_process_that_dies_is_a_violation(clone: Clone) -> None:
    clone.write("torch-ext/tiny/layers.py", "import os\n\nos._exit(3)\n")
    clone.rebuild()
    assert found(clone, load=True) == ["torch-npu, torch-universal: cannot be loaded: the process ended with 3"]


def test_a_refusal_comes_before_the_network(publisher, localhub, clone: Clone, monkeypatch) -> None:
    changed_file(clone.repository / "build")
    card_without_front_matter(clone.repository / "build")
    monkeypatch.setattr(preflight, "get_token", lambda: None)
    report = publisher()
    assert (report.status, report.exit_code) == ("refused", 1)
    assert len(report.reasons) == 3
    assert "HF_TOKEN" in report.reasons[-1]
    assert localhub.faults.requests == []
