"""The kernel repositories: fresh in the tree, and whole, loadable and true to the releases that they name."""

import ast
import functools
import importlib.util
import inspect
import json
import re
import shutil
import sys
from pathlib import Path

import build
import pytest
import torch
from kernels import get_local_kernel
from kernels.layer.layer import _create_func_module, _validate_layer
from torch import nn

from kernels_ext_npu.catalogue import LAYERS
from kernels_ext_npu.catalogue import REPOSITORIES as KNOWN
from kernels_ext_npu.distribution.variant_choice import decide, describe
from kernels_ext_npu.distribution.variants import names, repositories
from kernels_ext_npu.patterns.collection import FUNCTION_PATTERNS, PATTERNS
from kernels_ext_npu.selftest.layers.bare_modules import original
from kernels_ext_npu.selftest.layers.moe_blocks_v4 import BLOCKS
from publishing import local, preflight, trial
from strict import Strict, strict_variants

REPOSITORIES = repositories(build.ROOT)
NAMES = sorted(names(build.ROOT))
TREE = {f"torch{minor}-cxx11-cann82-aarch64-linux" for minor in (26, 27, 28)} | {"torch-npu", "torch-universal"}
SCHEMAS = Path(__file__).parent.parent / "data" / "torch_npu_schemas.txt"


each_repository = pytest.mark.parametrize("repository", REPOSITORIES, ids=lambda path: path.name)


def test_the_package_knows_all_repositories() -> None:
    assert tuple(path.name for path in REPOSITORIES) == KNOWN


# ---- fresh -----------------------------------------------------------------------------------------------------------
@each_repository
def test_the_committed_build_is_what_the_source_gives(repository: Path) -> None:
    assert build.differences(repository) == []
    assert {path.name for path in (repository / "build").iterdir()} == TREE


def test_every_kind_of_staleness_is_named_and_goes(norm: Path) -> None:
    source, variant = norm / "torch-ext" / "rmsnorm" / "layers.py", norm / "build" / "torch-universal"
    before = (variant / "metadata.json").read_text()
    stale = norm / "build" / "torch29-cxx11-cann85-aarch64-linux"  # which the tree does not hold
    stale.symlink_to("torch-universal")
    (variant / "extra.py").write_text("")
    (variant / "gated_norm.py").unlink()
    (variant / "layer_norm.py").unlink()
    (variant / "layer_norm.py").write_text("")
    (norm / "build" / "torch-npu").unlink()
    shutil.copytree(variant, norm / "build" / "torch-npu", symlinks=True)
    source.write_text(source.read_text() + "\n")
    assert set(build.differences(norm, norm.parent)) >= {
        "not built from the source: torch-universal/extra.py",
        "missing: torch-universal/gated_norm.py",
        "differs: torch-universal/layer_norm.py",
        "differs: torch-universal/metadata.json",
        "not built from the source: torch29-cxx11-cann85-aarch64-linux",
        "missing: torch-npu",
        "not built from the source: torch-npu/layers.py",
    }
    build.build(norm, norm.parent)
    assert build.differences(norm, norm.parent) == []
    assert json.loads((variant / "metadata.json").read_text())["id"] != json.loads(before)["id"]
    assert not list(norm.glob(".build-*"))


def test_the_tree_holds_few_entries_and_every_variant_has_its_layers() -> None:
    assert sum(len(build.tree(repository)) for repository in REPOSITORIES) <= 260
    for repository in REPOSITORIES:
        for name in TREE:
            assert {path.name for path in (repository / "build" / name).iterdir()} >= {"__init__.py", "metadata.json"}
            layers = repository.name in LAYERS.values()
            assert (repository / "build" / name / "layers.py").is_file() == layers


def test_a_file_in_a_folder_of_a_package_gets_the_common_files_that_it_imports(tmp_path: Path) -> None:
    """In both ways to import them, and what these import in turn."""
    files = {
        "__init__.py": "from .folder.nested import CANN",
        "folder/__init__.py": "",
        "folder/nested.py": "from .._common import silu\nfrom .._common.cann import CANN",
        "_common/__init__.py": "",
        "_common/cann.py": "from .captures import capturing",
        **dict.fromkeys(("_common/captures.py", "_common/silu.py", "_common/unused.py"), ""),
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    assert set(build.sources(tmp_path)) == files.keys() - {"_common/unused.py"}


def test_the_command_line(run_python) -> None:
    script = str(build.ROOT / "scripts" / "build.py")
    assert run_python(None, script, "--check").stdout == "".join(f"{r.name}: fresh\n" for r in REPOSITORIES)
    result = run_python(None, script, "Missing", check=False)
    assert result.returncode == 2
    assert "no kernel repository called Missing; there are" in result.stderr


# ---- loadable --------------------------------------------------------------------------------------------------------
def test_a_repository_has_one_id(whole: Path) -> None:
    """Its variants are the same, and may share the modules that are loaded under it."""
    ids = {path: json.loads(path.read_text())["id"] for path in whole.glob("*/build/*/metadata.json")}
    assert len(ids) == len(REPOSITORIES) * len(NAMES)
    assert len(set(ids.values())) == len({(path.parents[2], id) for path, id in ids.items()}) == len(REPOSITORIES)


@each_repository
def test_a_strict_variant_and_that_for_all_npus_may_be_published(repository: Path) -> None:
    """With their metadata and digests, the card, and imports of torch, the standard library and their own modules."""
    found = preflight.violations(local.find(repository.name, (NAMES[0], "torch-npu")), 1, load=False)
    assert [line for line in found if ": bytecode" not in line] == []  # that is left beside what has run


@pytest.mark.parametrize("name", NAMES)
def test_variants_load_and_compute(whole: Path, name: str) -> None:
    """Of one repository; by their own path, which leaves out the question whether they fit this machine."""
    assert (
        trial.failure(trial.selftest_function("rmsnorm"), get_local_kernel(whole / "RMSNorm" / "build" / name)) is None
    )


def test_the_universal_variants_need_no_torch_npu(run_python) -> None:
    """On a machine where it is not installed, and that knows no device called npu."""
    code = """
import pathlib, sys
sys.modules["torch_npu"] = None
sys.path.append(sys.argv[1])
import torch
from kernels import get_local_kernel
from kernels_ext_npu.catalogue import CATALOGUE
from kernels_ext_npu.selftest import functions
from publishing.trial import failure, selftest_function
for repository in CATALOGUE:
    kernel = get_local_kernel(pathlib.Path(sys.argv[1]).parent / repository.name)
    assert "torch-universal" in kernel.__file__
    assert failure(selftest_function(repository.kernel), kernel, "cpu") is None
"""
    run_python(code, str(build.ROOT / "scripts"), TORCH_DEVICE_BACKEND_AUTOLOAD="0")


@each_repository
def test_the_shim_serves_loaders_that_look_for_the_repositorys_name(repository: Path, monkeypatch) -> None:
    """As kernels 0.10 imports: the package `<variant>/<repository name>`, under that name."""
    name, shim = f"old_loader_{repository.name}", repository / "build" / "torch-npu" / repository.name / "__init__.py"
    spec = importlib.util.spec_from_file_location(name, shim)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    assert set(module.__all__) <= vars(module).keys()
    assert all(getattr(getattr(module, part), "__module__", name).startswith(name) for part in module.__all__)


@each_repository
def test_the_modules_that_are_imported_are_there(repository: Path) -> None:
    """In the variant, whenever they are imported. What absolute imports name may be published."""
    variant = repository / "build" / "torch-npu"
    for path in variant.rglob("*.py"):
        for node in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)):
            if node.level:
                above = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
                named = [above] if above.with_suffix(".py").is_file() else [above / alias.name for alias in node.names]
                assert all(each.with_suffix(".py").is_file() or each.is_dir() for each in named), (path, node.lineno)


# ---- chosen ----------------------------------------------------------------------------------------------------------
def chosen(*machine: str | None) -> list[str]:
    """What kernels' own resolver accepts on a described machine, best first."""
    decisions = decide([*NAMES, "unknown"], describe(*machine))
    assert sorted(decision.variant for decision in decisions if decision.reason) == NAMES
    return [decision.variant for decision in decisions if decision.rank]


@pytest.mark.parametrize("strict", strict_variants(build.ROOT), ids=lambda strict: strict.name)
def test_a_strict_variant_wins_where_it_fits(strict: Strict) -> None:
    """On the machine that it is written for."""
    assert chosen(strict.torch, strict.cann, "aarch64") == [strict.name, "torch-npu", "torch-universal"]


@pytest.mark.parametrize(
    ("torch", "cann", "cpu", "variants"),
    [
        ("2.13", "8.2", "aarch64", ["torch-npu", "torch-universal"]),
        ("2.9", "8.2", "aarch64", ["torch-npu", "torch-universal"]),
        ("2.8.0+cpu", "8.2", "x86_64", ["torch-npu", "torch-universal"]),
        ("2.13", None, "x86_64", ["torch-universal"]),
    ],
)
def test_elsewhere_those_for_all_machines_win(torch: str, cann: str | None, cpu: str, variants: list[str]) -> None:
    assert chosen(torch, cann, cpu) == variants


# ---- true to the releases --------------------------------------------------------------------------------------------
def schemas() -> dict[str, dict[str, str]]:
    """Release -> operator -> schema."""
    found: dict[str, dict[str, str]] = {}
    for releases, schema in re.findall(r"^\[(.+?)\] (\w+\(.* -> .*)", SCHEMAS.read_text(), re.MULTILINE):
        for release in releases.split():
            found.setdefault(release, {})[schema.partition("(")[0]] = schema
    return found


@functools.cache
def signature(schema: str) -> inspect.Signature:
    parameters = [
        inspect.Parameter(
            argument.name,
            inspect.Parameter.KEYWORD_ONLY if argument.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=None if argument.has_default_value() else inspect.Parameter.empty,
        )
        for argument in torch._C.parse_schema(schema).arguments
    ]
    return inspect.Signature(parameters)


def operator_calls(package: Path) -> list[tuple[str, int, set[str]]]:
    """Name, number of positional arguments and keywords of every call of a torch_npu operator."""
    calls = []
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                match = re.fullmatch(r"(?:torch\.ops\.npu|torch_npu)\.(\w+)", ast.unparse(node.func))
                if match is not None:
                    assert not any(isinstance(argument, ast.Starred) for argument in node.args), ast.unparse(node)
                    calls.append((match[1], len(node.args), {k.arg for k in node.keywords}))
    return calls


def detected(package: Path) -> tuple[set[str], set[tuple[str, str]]]:
    """What is there before it is used: the operators that are asked for, and parameters, each with its operator."""
    sources = "\n".join(path.read_text() for path in package.rglob("*.py"))
    operators = re.findall(r'hasattr\(torch\.ops\.npu, "(\w+)"\)', sources)
    return set(operators), set(re.findall(r'has_parameter\("(\w+)", "(\w+)"\)', sources))


RELEASES = schemas()
WITHOUT_OPERATORS = {"Linear"}  # of torch_npu: it computes by those of torch


def test_the_schemas_are_there_of_each_release_that_a_variant_names() -> None:
    assert {strict.torch_npu for strict in strict_variants(build.ROOT)} <= RELEASES.keys()


@each_repository
def test_every_operator_call_is_valid_in_all_releases(repository: Path) -> None:
    package = repository / "build" / "torch-npu"
    calls, (asked, of) = operator_calls(package), detected(package)
    assert calls or repository.name in WITHOUT_OPERATORS
    for release, schemas in RELEASES.items():
        for operator, positional, keywords in calls:
            assert operator in schemas or operator in asked, f"torch_npu {release} has no {operator}"
            if operator in schemas:
                given = {k: None for k in keywords if (operator, k) not in of}
                signature(schemas[operator]).bind(*[None] * positional, **given)


def replaced() -> dict[str, list[type[nn.Module]]]:
    """The classes whose forward each layer takes over, by layer; a function is a class to `kernels`."""
    found: dict[str, list[type[nn.Module]]] = {}
    for cls, layer in BLOCKS.items():
        found.setdefault(layer, []).append(cls)
    for reference in [each for each in PATTERNS if not each.name.endswith("@4")]:
        for layer in reference.layers:
            found.setdefault(layer, []).append(original(reference.name))
    for reference in FUNCTION_PATTERNS:
        found.setdefault(reference.layers[0], []).append(_create_func_module(original(reference.name)))
    return found


@each_repository
def test_layers_pass_kernels_own_validation(repository: Path) -> None:
    """As `kernels` checks them before it swaps them in: against each class that they serve, and what they can do."""
    layers, classes = getattr(get_local_kernel(repository), "layers", None), replaced()
    found = vars(layers).items() if layers else ()
    held = {name for name, each in found if isinstance(each, type) and issubclass(each, nn.Module) and name[0] != "_"}
    assert held == {layer for layer, name in LAYERS.items() if name == repository.name}
    for layer in (getattr(layers, name) for name in held):
        assert layer.can_torch_compile
        assert layer.has_backward
        for cls in classes[layer.__name__]:
            _validate_layer(check_cls=cls, cls=layer, repo=layer.__name__)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('torch26-cxx11-cann82-aarch64-linux = { torch_npu = "2.6.0" }', "must be written as"),
        ("torch26-cxx11-cann82-aarch64-linux = 3", "must be written as"),
        ('torch26-cxx11-cann82-aarch64-linux = { torch_npu = "2.7.1.post2", cann = "8.2.RC1" }', "begin with torch27-"),
        ('torch27-cxx11-cann82-aarch64-linux = { torch_npu = "2.7.1.post2", cann = "8.5.0" }', "cxx11-cann85-"),
    ],
)
def test_a_line_that_does_not_fit_its_variant_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "variants.toml").write_text(line)
    with pytest.raises(ValueError, match=message):
        strict_variants(tmp_path)
