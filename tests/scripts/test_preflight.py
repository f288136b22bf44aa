"""What is refused before the Hub is asked: each violation by name, and all of them at once."""

import json
import shutil
from collections.abc import Callable
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
    metadata["id"] = identity(metadata)
    (variant / "metadata.json").write_bytes(render(metadata))


def written(path: str, text: str) -> Callable[[Path], object]:
    """Write a file of torch-npu, or of the repository where it begins with a slash."""
    return lambda build: (build.parent / path[1:] if path[0] == "/" else build / "torch-npu" / path).write_text(text)


def rebuilt(variant: str, **fields: object) -> Callable[[Path], None]:
    return lambda build: rewrite(build / variant, **fields)


def other_edition(build: Path) -> None:
    path = build.parent / "build.toml"
    path.write_text(path.read_text().replace("edition = 5", "edition = 99"))


DIRTY = {"kernel-builder": {"version": "0.17.2"}, "kernel": {"commit": "0" * 40, "dirty": True}}
CARD = "---\nlibrary_name: {}\nlicense: {}\n---\n"
# what is done to a build, and the words that name it
VIOLATIONS: dict[str, tuple[Callable[[Path], object], str]] = {
    "unparsable name": (
        lambda build: shutil.copytree(build / "torch-npu", build / "torch99"),
        "torch99: kernels does not know such a variant",
    ),
    "name of no machine": (
        lambda build: shutil.copytree(build / "torch-npu", build / "torch-cann"),
        "no Ascend machine takes a variant of this name",
    ),
    "name of another backend": (
        lambda build: (build / STRICT).rename(build / "torch28-cxx11-cu128-x86_64-linux"),
        "the name is that of a variant for cuda",
    ),
    "missing metadata": (
        lambda build: (build / "torch-npu" / "metadata.json").unlink(),
        "torch-npu/metadata.json: missing",
    ),
    "changed file": (written("layers.py", ""), "torch-npu/layers.py: changed, its digest differs"),
    "extra file": (written("extra.py", ""), "torch-npu/extra.py: not in the digest, an extra file"),
    "other version": (rebuilt(STRICT, version=2), f"{STRICT}/metadata.json: version 2 on the branch v1"),
    "other backend": (rebuilt("torch-npu", backend={"type": "cuda"}), "torch-npu/metadata.json: the backend is cuda"),
    "uncommitted changes": (
        rebuilt("torch-npu", provenance=DIRTY),
        "torch-npu/metadata.json: built from a tree with uncommitted changes",
    ),
    "absolute import": (
        written("layers.py", "import torch\nfrom tiny.layers import Doubled\n"),
        "torch-npu/layers.py:2: an absolute import of tiny.layers",
    ),
    "not Python": (written("layers.py", "def\n"), "torch-npu/layers.py:1: not Python"),
    "card without front matter": (written("/README.md", "# Tiny\n"), "README.md: has no front matter"),
    "broken card": (written("/README.md", "---\nlicense: [\n---\n"), "README.md: the front matter cannot be read"),
    "card of another license": (
        written("/README.md", CARD.format("kernels", "mit")),
        "README.md: license is 'mit', build.toml says 'apache-2.0'",
    ),
    "card of another library": (
        written("/README.md", CARD.format("transformers", "apache-2.0")),
        "README.md: library_name is 'transformers'",
    ),
    "broken build file": (other_edition, "build.toml: "),
}


def violate(clone: Clone, *names: str) -> list[str]:
    """Do these, and return what names them."""
    for name in names:
        VIOLATIONS[name][0](clone.repository / "build")
    return [VIOLATIONS[name][1] for name in names]


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_violation_is_named(clone: Clone, name: str) -> None:
    (expected,) = violate(clone, name)
    assert [line for line in found(clone) if expected in line], found(clone)


def test_all_violations_come_at_once(clone: Clone) -> None:
    together = ("name of no machine", "changed file", "extra file", "other version", "broken card")
    expected = violate(clone, *together)
    lines = "\n".join(found(clone))
    assert [line for line in expected if line not in lines] == []


def test_only_the_chosen_variants_are_asked(clone: Clone) -> None:
    violate(clone, "changed file")
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
    (clone.repository / "build" / "torch-universal" / "layers.py").write_text("")
    assert f"{LEFT_OUT}/layers.py: changed, its digest differs" in found(clone, LEFT_OUT)
    (clone.repository / "build" / "torch-universal" / "metadata.json").unlink()
    with pytest.raises(RefusedError, match=r"torch-universal/metadata.json is not there: make build"):
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
    violate(clone, "changed file", "card without front matter")
    monkeypatch.setattr(preflight, "get_token", lambda: None)
    report = publisher()
    assert (report.status, report.exit_code) == ("refused", 1)
    assert len(report.reasons) == 3
    assert "HF_TOKEN" in report.reasons[-1]
    assert localhub.requests == []
