"""The kernel repositories: fresh in the tree, and whole, loadable and true to the releases that they name."""

import ast
import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path

import build
import pytest
from kernels import get_local_kernel
from kernels._rust import Digest, DigestAlgorithm, Metadata
from kernels.backends import CANN, CPU
from kernels.layer.layer import _create_func_module, _validate_layer
from kernels.variants import _resolve_variant_for_system, parse_variant
from packaging.version import Version
from torch import nn

from kernels_ext_npu.catalogue import LAYERS
from kernels_ext_npu.catalogue import REPOSITORIES as KNOWN
from kernels_ext_npu.distribution.variants import NOARCH, names, repositories
from kernels_ext_npu.patterns.collection import FUNCTION_PATTERNS, PATTERNS
from publishing import trial
from strict import Strict, strict_variants

REPOSITORIES = repositories(build.ROOT)
NAMES = sorted(names(build.ROOT))
# of one repository, all variants; of each other, whose variants hold the same files, one
LOADED = [(repository, "torch-npu") for repository in KNOWN if repository != "Activation"]
LOADED += [("Activation", name) for name in NAMES]
TREE = {f"torch{minor}-cxx11-cann82-aarch64-linux" for minor in (26, 27, 28)} | {"torch-npu", "torch-universal"}
SCHEMAS = Path(__file__).parent.parent / "data" / "torch_npu_schemas.txt"


def named(repository: Path) -> str:
    return repository.name


each_repository = pytest.mark.parametrize("repository", REPOSITORIES, ids=named)


def test_the_package_knows_all_repositories() -> None:
    assert tuple(path.name for path in REPOSITORIES) == KNOWN


# ---- fresh -----------------------------------------------------------------------------------------------------------
@each_repository
def test_the_committed_build_is_what_the_source_gives(repository: Path) -> None:
    assert build.differences(repository) == []


@each_repository
def test_the_tree_holds_those_for_all_machines_and_for_cann_8_2(repository: Path) -> None:
    assert {path.name for path in (repository / "build").iterdir()} == TREE


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy of the project's kernel repositories, for tests that write."""
    for repository in REPOSITORIES:
        shutil.copytree(repository, tmp_path / repository.name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(build.ROOT / "variants.toml", tmp_path)
    return tmp_path


def test_building_twice_gives_identical_bytes(clone: Path) -> None:
    repository = clone / "RMSNorm"
    before = {path: path.read_bytes() for path in (repository / "build").rglob("*") if path.is_file()}
    build.build(repository, clone)
    assert before == {path: path.read_bytes() for path in (repository / "build").rglob("*") if path.is_file()}
    assert not list(repository.glob(".build-*"))


@pytest.mark.parametrize("edit", ["changed", "added", "removed", "source"])
def test_every_kind_of_staleness_is_named(clone: Path, edit: str) -> None:
    repository = clone / "RMSNorm"
    layers = repository / "build" / "torch-npu" / "layers.py"
    if edit == "changed":
        layers.write_text(layers.read_text() + "\n")
        expected = ["differs: torch-npu/layers.py"]
    elif edit == "added":
        (layers.parent / "extra.py").write_text("")
        expected = ["not built from the source: torch-npu/extra.py"]
    elif edit == "removed":
        layers.unlink()
        expected = ["missing: torch-npu/layers.py"]
    else:
        (repository / "torch-ext" / "rmsnorm" / "layers.py").write_text("")
        expected = [f"differs: {name}/{file}" for name in TREE for file in ("layers.py", "metadata.json")]
    assert sorted(build.differences(repository, clone)) == sorted(expected)
    build.build(repository, clone)
    assert build.differences(repository, clone) == []


def test_a_variant_that_the_tree_does_not_hold_is_stale_and_goes(clone: Path) -> None:
    stale = clone / "RMSNorm" / "build" / "torch29-cxx11-cann85-aarch64-linux"
    shutil.copytree(stale.parent / "torch-npu", stale)
    found = build.differences(clone / "RMSNorm", clone)
    assert f"not built from the source: {stale.name}/layers.py" in found
    build.build(clone / "RMSNorm", clone)
    assert not stale.exists()


def test_the_command_line(run_python) -> None:
    script = str(build.ROOT / "scripts" / "build.py")
    assert run_python(None, script, "--check").stdout == "".join(f"{r.name}: fresh\n" for r in REPOSITORIES)
    result = run_python(None, script, "Missing", check=False)
    assert result.returncode == 2
    assert "no kernel repository called Missing; there are" in result.stderr


# ---- loadable --------------------------------------------------------------------------------------------------------
@each_repository
def test_metadata_and_digests_hold(whole: Path, repository: Path) -> None:
    """Of each variant; but for these two files, all hold what ``torch-npu`` holds."""
    build_folder = whole / repository.name / "build"
    assert sorted(variant.name for variant in build_folder.iterdir()) == NAMES
    shared = Digest.hash_variant(DigestAlgorithm.SHA256, build_folder / "torch-npu").files
    for variant in build_folder.iterdir():
        metadata = Metadata.read_from_file(variant / "metadata.json")
        written = json.loads((variant / "metadata.json").read_text())
        assert written["version"] == 1
        assert written["backend"] == {"type": "cann"}
        assert written["python-depends"] == []
        assert re.fullmatch(r"_[a-z0-9_]+", str(metadata.id))
        assert written["digest"]["files"] == Digest.hash_variant(DigestAlgorithm.SHA256, variant).files == shared
        assert parse_variant(variant.name).variant_str == variant.name


def test_ids_are_unique(whole: Path) -> None:
    ids = [json.loads(path.read_text())["id"] for path in whole.glob("*/build/*/metadata.json")]
    assert len(set(ids)) == len(ids) == len(REPOSITORIES) * len(NAMES)


def test_an_id_changes_with_the_content(clone: Path) -> None:
    source = clone / "RMSNorm" / "torch-ext" / "rmsnorm" / "layers.py"
    before = json.loads(build.render(clone / "RMSNorm", NOARCH)["torch-npu/metadata.json"])["id"]
    source.write_text(source.read_text() + "\n")
    assert json.loads(build.render(clone / "RMSNorm", NOARCH)["torch-npu/metadata.json"])["id"] != before


@pytest.mark.parametrize(("repository", "name"), LOADED)
def test_variants_load_and_compute(whole: Path, repository: str, name: str) -> None:
    """By their own path, which leaves out the question whether they fit this machine."""
    variant = whole / repository / "build" / name
    function = trial.of(json.loads((variant / "metadata.json").read_text())["name"])
    assert trial.failure(function, get_local_kernel(variant)) is None


def test_the_universal_variants_need_no_torch_npu(run_python) -> None:
    """On a machine where it is not installed, and that knows no device called npu."""
    names = [build.tomllib.loads((path / "build.toml").read_text())["general"]["name"] for path in REPOSITORIES]
    codes = [
        f"""
kernel = get_local_kernel(pathlib.Path({str(repository)!r}))
assert "torch_universal" in kernel.__name__
assert failure(of({name!r}), kernel, "cpu") is None
"""
        for repository, name in zip(REPOSITORIES, names)
    ]
    first = f"""
import pathlib, sys
sys.modules["torch_npu"] = None
sys.path.append({str(build.ROOT / "scripts")!r})
import torch
from kernels import get_local_kernel
from kernels_ext_npu.selftest import functions
from publishing.trial import failure, of
"""
    run_python(first + "".join(codes), TORCH_DEVICE_BACKEND_AUTOLOAD="0")


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
def test_imports_are_of_the_variant_of_torch_or_of_the_standard_library(repository: Path) -> None:
    """Where they are relative, the module lies in the variant, whenever it is imported."""
    variant = repository / "build" / "torch-npu"
    own = {path.stem for path in variant.glob("*.py")}
    for path in variant.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert {alias.name.partition(".")[0] for alias in node.names} <= {"torch"} | sys.stdlib_module_names
            elif isinstance(node, ast.ImportFrom) and not node.level:
                assert node.module.partition(".")[0] in {"torch"} | sys.stdlib_module_names
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 1
                assert {node.module} <= own if node.module else {alias.name for alias in node.names} <= own


# ---- chosen ----------------------------------------------------------------------------------------------------------
def chosen(torch: str, cann: str | None, cpu: str = "aarch64") -> list[str]:
    """What kernels' own resolver accepts on a described machine, best first."""
    accepted, _ = _resolve_variant_for_system(
        variants=[parse_variant(name) for name in NAMES],
        selected_backend=CPU() if cann is None else CANN(version=Version(cann)),
        cpu=cpu,
        os="linux",
        torch_version=Version(torch),
        torch_cxx11_abi=True,
        tvm_ffi_version=None,
    )
    return [variant.variant_str for variant in accepted]


@pytest.mark.parametrize("strict", strict_variants(build.ROOT), ids=lambda strict: strict.name)
def test_a_strict_variant_wins_where_it_fits(strict: Strict) -> None:
    """On the machine that it is written for: torch and CANN as `kernels` reads their versions."""
    torch, cann = strict.torch.rpartition(".")[0], f"{strict.cann[0]}.{strict.cann[2]}"
    assert chosen(torch, cann) == [strict.name, "torch-npu", "torch-universal"]


@pytest.mark.parametrize(
    ("torch", "cann", "cpu"), [("2.13", "8.2", "aarch64"), ("2.9", "8.2", "aarch64"), ("2.8", "8.2", "x86_64")]
)
def test_elsewhere_the_variant_for_all_npus_wins(torch: str, cann: str, cpu: str) -> None:
    assert chosen(torch, cann, cpu) == ["torch-npu", "torch-universal"]


def test_without_an_npu_only_the_universal_variant_is_left() -> None:
    assert chosen("2.13", None, "x86_64") == ["torch-universal"]


# ---- true to the releases --------------------------------------------------------------------------------------------
def schemas() -> dict[str, dict[str, str]]:
    """Release -> operator -> parameters."""
    found: dict[str, dict[str, str]] = {}
    for releases, name, parameters in re.findall(r"^\[(.+?)\] (\w+)\((.*)\) -> ", SCHEMAS.read_text(), re.MULTILINE):
        for release in releases.split():
            found.setdefault(release, {})[name] = parameters
    return found


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


def detected(package: Path) -> set[str]:
    """The operators whose presence is asked for before they are called."""
    sources = "\n".join(path.read_text() for path in sorted(package.rglob("*.py")))
    return set(re.findall(r'hasattr\(torch\.ops\.npu, "(\w+)"\)', sources))


def detected_parameters(package: Path) -> set[tuple[str, str]]:
    """The parameters whose presence is asked for before they are given, each with its operator."""
    sources = "\n".join(path.read_text() for path in sorted(package.rglob("*.py")))
    return set(re.findall(r'has_parameter\("(\w+)", "(\w+)"\)', sources))


def misfit(parameters: str, positional: int, keywords: set[str]) -> str | None:
    """Why a call does not fit a schema."""
    before, _, behind = parameters.partition("*, ") if "*, " in parameters else (parameters, "", "")
    split = [[p for p in re.split(r", (?![^\[]*\])", part) if p] for part in (before, behind)]
    names = [[p.split("=")[0].split()[-1] for p in part] for part in split]
    if positional > len(names[0]):
        return f"{positional} positional arguments, the schema takes {len(names[0])}"
    given = set(names[0][:positional]) | keywords
    if unknown := keywords - set(names[0][positional:]) - set(names[1]):
        return f"no parameters {unknown}"
    required = {n for part, ns in zip(split, names) for p, n in zip(part, ns) if "=" not in p}
    return f"missing {required - given}" if required - given else None


RELEASES = schemas()
WITHOUT_OPERATORS = {"CrossEntropy"}  # of torch_npu: it computes by those of torch


def test_the_schemas_are_there_of_each_release_that_a_variant_names() -> None:
    assert {strict.torch_npu for strict in strict_variants(build.ROOT)} <= RELEASES.keys()


@each_repository
def test_every_operator_call_is_valid_in_all_releases(repository: Path) -> None:
    package = repository / "build" / "torch-npu"
    calls, asked, of = operator_calls(package), detected(package), detected_parameters(package)
    assert calls or repository.name in WITHOUT_OPERATORS
    for release, schemas in RELEASES.items():
        for operator, positional, keywords in calls:
            assert operator in schemas or operator in asked, f"torch_npu {release} has no {operator}"
            given = {k for k in keywords if (operator, k) not in of}
            assert operator not in schemas or misfit(schemas[operator], positional, given) is None


def test_the_check_finds_calls_that_do_not_fit() -> None:
    parameters = RELEASES["2.6.0"]["npu_rms_norm"]
    assert misfit(parameters, 3, set()) is None
    assert misfit(parameters, 2, {"epsilon"}) is None
    assert "positional" in misfit(parameters, 4, set())
    assert "no parameters" in misfit(parameters, 2, {"eps"})
    assert "missing" in misfit(parameters, 1, set())
    assert "npu_clipped_swiglu" not in RELEASES["2.6.0"]
    assert "no parameters" in misfit(RELEASES["2.6.0"]["npu_rotary_mul"], 3, {"rotate"})


def replaced() -> dict[str, list[type[nn.Module]]]:
    """The classes whose forward each layer takes over, by layer; a function is a class to `kernels`."""
    found: dict[str, list[type[nn.Module]]] = {}
    for reference in PATTERNS:
        for layer in reference.layers:
            found.setdefault(layer, []).append(reference.original)
    for reference in FUNCTION_PATTERNS:
        found.setdefault(reference.layers[0], []).append(_create_func_module(reference.original))
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
