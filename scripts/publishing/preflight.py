"""Check what has to be true before anything is asked of the Hub. Every violation is listed, not the first alone."""

from __future__ import annotations

import ast
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml
from huggingface_hub import ModelCard, get_token
from kernels._rust import Build, Metadata
from kernels.variants import NoarchVariant, parse_variant

from kernels_ext_npu.distribution.variants import METADATA, NOARCH, write
from kernels_ext_npu.distribution.verification import Verified, verify_build
from publishing import trial
from publishing.local import CARD, Local

IMPORTABLE = {"torch", "torch_npu", *sys.stdlib_module_names}


def violations(local: Local, version: int, pruned: tuple[str, ...] = (), load: bool = True) -> list[str]:
    """List everything that speaks against publishing the chosen variants as the version.

    Args:
        load: in a fresh process, each variant that this machine can load.
    """
    with tempfile.TemporaryDirectory(prefix="kernels-ext-npu-") as folder:
        build = Path(folder) / "build"
        write(local.built, build)
        found = [*_build_file(local), *_selection(local, build, pruned), *_card(local)]
        there = [variant for variant in local.variants if (build / variant).is_dir()]
        verified = [entry for entry in verify_build(build) if entry.variant in there] if there else []
        for entry in verified:
            found += [f"{entry.variant}/{problem}" for problem in entry.problems]
            found += [f"{entry.variant}/{problem}" for problem in _variant(entry, version)]
        loadable = [e.variant for e in verified if e.is_variant and trial.loadable(e.path)]
        if load and loadable:
            found += trial.load_local({variant: build / variant for variant in loadable})
    return found


def token_violation() -> list[str]:
    """Say that there is no token, without which the Hub takes nothing."""
    return [] if get_token() else ["no token: set HF_TOKEN in the environment, or log in with `hf auth login`"]


def _build_file(local: Local) -> Iterator[str]:
    try:
        Build.open(local.folder)
    except ValueError as error:
        yield f"build.toml: {error}"


def _selection(local: Local, build: Path, pruned: tuple[str, ...]) -> Iterator[str]:
    if not local.variants and not pruned:
        yield f"{local.folder.name}/build has no variants: make build"
    for variant in local.variants:
        if not (build / variant).is_dir():
            yield f"there is no variant {variant} in {local.folder.name}/build"
        if variant in pruned:
            yield f"{variant} cannot be published and pruned at once"


def _variant(entry: Verified, version: int) -> Iterator[str]:
    yield from _name(entry)
    if entry.version is not None and entry.version != version:
        yield f"{METADATA}: version {entry.version} on the branch v{version}: set it in build.toml, then make build"
    for path in sorted(entry.path.rglob("*")):
        if path.suffix == ".py" and path.is_file():
            name = path.relative_to(entry.path)
            yield from (f"{name}:{problem}" for problem in _imports(path.read_bytes()))


def _name(entry: Verified) -> Iterator[str]:
    """Refuse a backend other than CANN's, in the metadata and in the name of the variant, which kernels goes by."""
    try:
        variant = parse_variant(entry.variant)
        metadata = Metadata.read_from_file(entry.path / METADATA)
    except (ValueError, OSError):  # named by the verification
        return
    backend = str(metadata.backend.backend_type).rpartition(".")[2].lower()
    if backend != "cann":
        yield f"{METADATA}: the backend is {backend}; kernels for Ascend have cann"
    if isinstance(variant, NoarchVariant):
        if entry.variant not in NOARCH:
            yield f"no Ascend machine takes a variant of this name; without versions it is {' or '.join(NOARCH)}"
    elif variant.arch.backend.name != "cann":
        yield f"the name is that of a variant for {variant.arch.backend.name}"
    if metadata.provenance is not None and metadata.provenance.dirty:
        yield f"{METADATA}: built from a tree with uncommitted changes"


def _imports(source: bytes) -> Iterator[str]:
    """Refuse absolute imports of a variant's own modules: it is loaded under a name that it does not know."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        yield f"{getattr(error, 'lineno', 1)}: not Python: {error}"
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        else:
            continue
        for name in names:
            if name.partition(".")[0] not in IMPORTABLE:
                yield f"{node.lineno}: an absolute import of {name}; all but torch and the standard library is relative"


def _card(local: Local) -> Iterator[str]:
    try:
        content = local.card()[CARD].decode()
        data = ModelCard(content).data.to_dict()
    except OSError as error:
        yield f"{CARD}: cannot be read: {error.strerror}"
        return
    except (ValueError, TypeError, yaml.YAMLError) as error:
        yield f"{CARD}: the front matter cannot be read: {' '.join(str(error).split())}"
        return
    if not content.startswith("---"):
        yield f"{CARD}: has no front matter: a block of YAML between two lines of ---"
        return
    if data.get("library_name") != "kernels":
        yield f"{CARD}: library_name is {data.get('library_name')!r}, a kernel's is 'kernels'"
    licensed = str(local.general.get("license", "")).lower()
    if data.get("license") != licensed:
        yield f"{CARD}: license is {data.get('license')!r}, build.toml says {licensed!r}"
