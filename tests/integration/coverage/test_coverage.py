"""What ``kernels-ext-npu coverage`` counts, against transformers' source and against models that were kernelized."""

import json
import re
from functools import cache
from pathlib import Path

import pytest
import transformers

import kernels_ext_npu
from kernels_ext_npu.catalogue import (
    ATTENTION,
    EXPERTS,
    FUNCTIONS,
    HEADS,
    NORMS,
    PATCHES,
    ROTARY,
    ROUTERS,
    TABLES,
)
from kernels_ext_npu.coverage import survey as surveying
from kernels_ext_npu.coverage.survey import Entry, Row
from kernels_ext_npu.matching import classification
from tests.support import zoo
from tests.support.counted import counted
from tests.support.transformers_files import modeling_files

SOURCE = Path(transformers.__path__[0]) / "models"


@cache
def survey() -> list[Row]:
    modeling_files()  # imported sooner than by the survey
    return surveying.survey()


def listed() -> list[tuple[str, str, str, str]]:
    """Kind, code, text and name of what is in unsupported.json."""
    kinds = json.loads((Path(classification.__file__).parent / "unsupported.json").read_text())
    texts = [(kind, code, text) for kind, codes in kinds.items() for code in codes for text in codes[code]]
    return [(kind, code, text, name) for kind, code, text in texts for name in kinds[kind][code][text]]


def entries() -> list[Entry]:
    return [entry for row in survey() for entry in row.entries]


def in_source(pattern: str) -> set[tuple[str, str]]:
    """(file, name) of what a pattern finds in the text of the modeling files that can be imported."""
    missing = {file for row in survey() for file in row.missing}
    paths = [path for path in SOURCE.glob("*/modeling_*.py") if path.name not in missing]
    files = {path.stem.removeprefix("modeling_"): path.read_text() for path in paths}
    return {(file, name) for file, text in files.items() for name in re.findall(pattern, text, re.MULTILINE)}


def test_every_reason_is_written_down() -> None:
    assert all((entry.layer is None) != (entry.reason is None) for entry in entries())
    assert not [entry for entry in entries() if entry.reason == classification.UNKNOWN]


@counted
def test_every_reason_is_about_something() -> None:
    with_files = {kind.name for kind in (*FUNCTIONS, ATTENTION)}
    derived = (classification.UNNAMED, classification.BIASED)  # of attention, from the forward of a class
    unserved = [
        (e.kind, f"{e.file}:{e.name}" if e.kind in with_files else e.name)
        for e in entries()
        if e.reason and e.reason not in derived
    ]
    assert sorted((kind, name) for kind, code, text, name in listed()) == sorted(unserved)


def test_each_reason_is_a_limit_of_the_device_or_of_the_maths() -> None:
    for kind, code, text, name in listed():
        reason = classification.UNSUPPORTED[kind][name]
        assert (reason.code, classification.without_code(reason), reason) == (code, text, f"{code}: {text}")
        assert code in classification.CODES


@pytest.mark.parametrize(
    ("kind", "pattern", "is_served"),
    [
        (NORMS.name, r"^class (\w*RMSNorm\w*)\(nn\.Module\)", None),
        (NORMS.name, r'^@use_kernel_forward_from_hub\("RMSNorm\w*"\)\nclass (\w+)', True),
        (ROTARY.name, r'^@use_kernel_forward_from_hub\("rotary_pos_emb"\)\ndef (\w+)', True),
        (ROTARY.name, r"^def (apply_rotary_pos_emb\w*)\(", None),
        (TABLES.name, r"^class (\w*Rotary\w*Embedding)\(", None),
        (EXPERTS.name, r"^@use_experts_implementation.*\nclass (\w+)", True),
        (ROUTERS.name, r"^class (\w*Router)\(nn\.Module\)", None),
    ],
)
def test_what_the_source_shows_is_counted(kind: str, pattern: str, is_served: bool | None) -> None:
    found = {(entry.file, entry.name): entry.layer is not None for entry in entries() if entry.kind == kind}
    expected = in_source(pattern)
    assert len(expected) > 60
    assert expected <= found.keys()
    assert is_served is None or {found[name] for name in expected} == {is_served}


def test_no_modeling_file_is_left_out() -> None:
    rows = [row for row in survey() if row.folder.model_types]
    read = [file.rpartition(".")[2] + ".py" for row in rows for file in row.folder.files]
    assert sorted([*read, "modeling_auto.py"]) == sorted(path.name for path in SOURCE.glob("*/modeling_*.py"))


MODELS = (
    "qwen3_moe", "qwen2_5_vl", "qwen3_next", "gemma3", "gemma4", "gpt_oss", "deepseek_v3", "deepseek_v4", "llama4",
    "nemotron_h", "zamba2", "falcon_h1", "jetmoe", "cohere2", "olmo2", "seed_oss", "mistral3", "t5", "bert",
)  # fmt: skip
SWAPPED = {"t5": 1, "cohere2": 2, "nemotron_h": 2}  # classes and functions, at least


@pytest.mark.parametrize("name", [name for name in MODELS if name in zoo.ARCHITECTURES])
def test_a_kernelized_model_has_what_its_model_types_are_said_to_have(registered, name: str) -> None:
    model = kernels_ext_npu.kernelize(zoo.build(name).to("npu"))
    types = {config.model_type for module in model.modules() if (config := getattr(module, "config", None))}
    folders = [row for row in survey() if types.intersection(row.folder.model_types)]
    known = {(entry.file, entry.name): entry for row in folders for entry in row.entries}
    rows = {row.path: row for row in kernels_ext_npu.report(model)}

    def find_entry(path: str) -> Entry | None:
        module, _, function = path.rpartition(".")
        owner = model.get_submodule(module if is_function(path) else path)
        file = type(owner).__module__.rpartition("modeling_")[2]
        return known.get((file, function if is_function(path) else type(owner).__name__))

    def is_function(path: str) -> bool:
        return rows[path].function is not None

    swapped = set()
    for path, row in rows.items():
        entry = find_entry(path)
        if row.kind in (PATCHES.name, HEADS.in_models):  # a layer of torch, of which an instance may be served
            assert entry is None, path
            continue
        layers = entry.layer.split(" or ") if entry and entry.layer else [None]
        assert row.kernel in layers, path  # also where something of the instance stands in the way
        assert row.swapped <= (row.kernel is not None)
        if row.swapped:
            swapped.add((entry.file, entry.name))
    for path, module in model.named_modules():
        file = type(module).__module__.rpartition("modeling_")[2]
        entry = known.get((file, type(module).__name__))
        assert entry is None or entry.layer is None or path in rows, path
    assert len(swapped) >= SWAPPED.get(name, 3)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import a_package_that_is_nowhere", "needs a_package_that_is_nowhere, which is not installed"),
        ("raise ImportError('a\\nb')", "cannot be imported: ImportError: a b"),
        ("raise OSError('libtoy.so: no such file')", "cannot be imported: OSError: libtoy.so: no such file"),
    ],
)
def test_what_cannot_be_imported_is_listed_with_the_reason(tmp_path: Path, monkeypatch, code: str, reason: str) -> None:
    (tmp_path / "modeling_toy.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    (row,) = surveying.survey([surveying.Folder("toy", (), ("modeling_toy",))])
    assert (row.entries, row.missing) == ((), {"modeling_toy.py": reason})
