"""integration/transformers.patch: transformers with the kernels, and without this package."""

import ast
import inspect
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import transformers

from tests.localhub import LocalHub
from tests.support.published_kernels import publish

ROOT = Path(__file__).resolve().parent.parent.parent
PATCH = ROOT / "integration" / "transformers.patch"
INSTALLED = Path(transformers.__file__).parent

pytestmark = pytest.mark.skipif(transformers.__version__ != "5.22.2", reason="the patch is for transformers 5.22.2")

NEW = ("RMSNormZeroCentered", "SiLUGatedMLP", "rotary_pos_emb_half_width")

# Every name with an entry for the NPU -> the layers that compute what the classes of that name compute, and the
# functions of that name that a class shows to `kernels`.
EVERY_MARK = """
import sys
import softnpu, json
sys.path.append(sys.argv[1])
from kernels_ext_npu.matching.lookup import find_pattern
from kernels_ext_npu.transformers_internals import is_kernel_function
from tests.support.transformers_files import modeling_files, module_classes
from transformers.integrations.hub_kernels import get_kernel_mapping_transformers

found = {name: set() for name, devices in get_kernel_mapping_transformers().items() if "npu" in devices}
for cls in module_classes():
    mark = getattr(cls, "kernel_layer_name", None)
    if mark in found:
        reference = find_pattern(cls)
        found[mark].add(reference.layers[0] if reference else cls.__name__)
for module in modeling_files():
    for name, value in vars(module).items():
        mark = getattr(type(value), "kernel_layer_name", None) if is_kernel_function(value) else None
        if mark in found and f"use_kernelized_func({name})" in open(module.__file__).read():
            reference = find_pattern(value)
            found[mark].add(reference.layers[0] if reference else f"{module.__name__}.{name}")
print(json.dumps({name: sorted(layers) for name, layers in found.items()}))
"""


def mapping() -> dict[str, dict]:
    """The default table of the transformers that is imported: name -> device -> what is loaded from where."""
    from transformers.integrations.hub_kernels import _build_kernel_mapping

    def plain(entry):
        if isinstance(entry, dict):
            return {str(key): plain(value) for key, value in entry.items()}
        return {name: str(value) for name, value in vars(entry).items()}

    return plain(_build_kernel_mapping())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source tree of the installed transformers, patched."""
    root = tmp_path_factory.mktemp("transformers")
    shutil.copytree(INSTALLED, root / "src" / "transformers")  # with the compiled files, which are still right
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(root.parent)}
    subprocess.run(["git", "apply", str(PATCH)], cwd=root, env=environment, check=True)
    return root / "src"


@pytest.fixture
def run_patched(source: Path, run_forked) -> Callable[..., str]:
    """The last line that a process with the patched transformers, and without this package, prints."""

    def run(*arguments: str, **environment: str) -> str:
        paths = os.pathsep.join(map(str, (source, ROOT, ROOT / "tests")))
        return run_forked(*arguments, PYTHONPATH=paths, **environment).stdout.splitlines()[-1]

    return run


@pytest.mark.long
def test_models_run_the_kernels_without_this_package(run_patched, localhub: LocalHub, tmp_path: Path) -> None:
    """Each agrees with the CPU in forward, gradients, tokens, and both modes: see patched_models.py."""
    publish(localhub, "card")
    script = str(Path(__file__).with_name("patched_models.py"))
    environment = localhub.environment(tmp_path / "home")
    answer = json.loads(run_patched(None, "-m", "softnpu", script, str(tmp_path), **environment))
    models = {name: result["layers"] for name, result in answer["models"].items()}
    norm, rotation = "RMSNormCastLast", {"rotary_pos_emb": "RotaryPosEmbCastBack"}
    assert models == {
        "qwen3": {"Qwen3RMSNorm": norm, "Qwen3MLP": "SwiGLUMLP"} | rotation,
        "gemma3_text": {"Gemma3RMSNorm": "RMSNormZeroCentered"} | rotation,
        "phi3": {"Phi3RMSNorm": norm, "Phi3MLP": "FusedSwiGLUMLP"},
        "qwen3_moe": {"Qwen3MoeRMSNorm": norm} | rotation,
        "gpt_oss": {"GptOssRMSNorm": norm, "rotary_pos_emb_half_width": "RotaryPosEmbHalfWidth"},
        "nanochat": {},
        "llama-gelu": {"LlamaRMSNorm": norm} | rotation,
        "qwen3-gelu": {"Qwen3RMSNorm": norm} | rotation,
        "qwen3_next": {"Qwen3NextRMSNorm": "RMSNormZeroCentered", "Qwen3NextRMSNormGated": "RMSNormGatedCastLast"},
    }
    assert {name: result["training"] for name, result in answer["models"].items()} == models
    assert answer["kernels"] == ["fused-moe", "rmsnorm", "rope", "swiglu"]
    for name, layers in models.items():
        for calls in (answer["models"][name]["calls"], answer["models"][name]["calls in training"]):
            assert ("npu_rms_norm" in calls) == (name != "nanochat"), name
            assert ("npu_rotary_mul" in calls) == any("rotary" in key for key in layers), name
            assert ("npu_swiglu" in calls) == ("MLP" in str(layers) or name in ("qwen3_moe", "qwen3_next")), name
            assert ("npu_grouped_matmul" in calls) == (name in ("qwen3_moe", "gpt_oss", "qwen3_next")), name


@pytest.mark.long
def test_expectations_by_device_can_be_asked_for_on_an_npu(run_patched, run_forked) -> None:
    code = (
        "import softnpu; from transformers.testing_utils import get_device_properties; print(get_device_properties())"
    )
    assert run_patched(code) == "('npu', None, None)"
    assert "UnboundLocalError" in run_forked(code, check=False).stderr  # if not, the patch needs it no longer


def test_the_mappings_of_other_devices_are_what_they_were(run_patched) -> None:
    code = f"import softnpu, json\n{inspect.getsource(mapping)}\nprint(json.dumps(mapping()))"
    before, after = mapping(), json.loads(run_patched(code))
    new = {name: {device for device in after[name] if device != "npu"} for name in after.keys() - before.keys()}
    assert new == {
        "RMSNormZeroCentered": set(),
        "SiLUGatedMLP": set(),
        "FusedSiLUGatedMLP": set(),
        "rotary_pos_emb_half_width": {"cuda", "rocm", "xpu"},
    }
    for name in before:
        others = [{d: entry for d, entry in table[name].items() if d != "npu"} for table in (before, after)]
        assert others[0] == others[1]
    base, half = after["rotary_pos_emb"], after["rotary_pos_emb_half_width"]
    assert {d: entry for d, entry in half.items() if d != "npu"} == {d: e for d, e in base.items() if d != "npu"}


def test_what_was_marked_before_keeps_its_mark_but_for_three_rotary_functions(source: Path) -> None:
    """A mark is what other devices look for."""
    changed = {}
    for path in re.findall(r"^\+\+\+ b/src/transformers/(models/\w+/modeling_\w+\.py)$", PATCH.read_text(), re.M):
        before, after = _decorators(INSTALLED / path), _decorators(source / "transformers" / path)
        for name, decorators in before.items():
            if decorators and decorators != after[name]:
                changed[f"{Path(path).parent.name}.{name}"] = after[name]
    half_width = ['use_kernel_forward_from_hub("rotary_pos_emb_half_width")']
    assert changed == {
        "gpt_oss.apply_rotary_pos_emb": half_width,
        "nanochat.NanoChatAttention": [],
        "openai_privacy_filter.apply_rotary_pos_emb": half_width,
        "openai_privacy_filter.OpenAIPrivacyFilterAttention": [],
    }


def test_generated_classes_have_the_decorators_that_the_modular_file_gives_them(source: Path) -> None:
    """Its own if it writes any, else those of the class in the other model that it inherits from.

    Not a run of transformers' converter, which is not in the wheel: its rule, which the installed files keep as well.
    """
    models = source / "transformers" / "models"
    marked = re.findall(r"^\+@use_kernel_forward_from_hub.*\n class (\w+)\(", PATCH.read_text(), re.M)
    checked = set()
    for modular in models.glob("*/modular_*.py"):
        text = modular.read_text()
        if not re.search(rf"\b({'|'.join(marked)})\b", text):
            continue
        own, generated = map(_decorators, (modular, modular.with_name(modular.name.replace("modular_", "modeling_"))))
        tree, imported = ast.parse(text), {}
        for node in ast.walk(tree):
            match = re.fullmatch(r"(?:transformers\.models\.)?(\w+)\.modeling_\1", getattr(node, "module", None) or "")
            if isinstance(node, ast.ImportFrom) and match:
                parents = _decorators(models / match[1] / f"modeling_{match[1]}.py")
                imported |= {alias.asname or alias.name: parents.get(alias.name, []) for alias in node.names}
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name in generated:
                inherited = next((imported[name] for name in map(ast.unparse, node.bases) if name in imported), [])
                if node.name in marked or any(mark in str(inherited) for mark in NEW):
                    expected = own[node.name] if node.decorator_list else inherited
                    assert generated[node.name] == expected, f"{modular.name}: {node.name}"
                    checked.add(node.name)
    # the others are copied because a class that is inherited from uses them
    assert len(checked) >= 25


@pytest.mark.long
def test_no_mark_gives_a_class_or_function_a_kernel_that_computes_something_else(run_patched) -> None:
    """Of all models; what they compute is told by matching.py."""
    found = json.loads(run_patched(EVERY_MARK, str(ROOT / "integration")))
    assert found == {
        "RMSNorm": ["RMSNorm", "RMSNormCastLast"],
        "RMSNormGated": ["RMSNormGated", "RMSNormGatedCastLast"],
        "RMSNormZeroCentered": ["RMSNormZeroCentered"],
        "SiLUGatedMLP": ["SwiGLUMLP"],
        "FusedSiLUGatedMLP": ["FusedSwiGLUMLP"],
        "rotary_pos_emb": [
            "RotaryPosEmb",
            "RotaryPosEmbCastBack",
            "RotaryPosEmbFloat32",
            "RotaryPosEmbTablesInFloat32",
        ],
        "rotary_pos_emb_half_width": ["RotaryPosEmbHalfWidth"],
    }


@cache
def _decorators(path: Path) -> dict[str, list[str]]:
    """Those for kernels of each class and function."""
    definitions = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef | ast.FunctionDef)]
    return {n.name: [_text(d) for d in n.decorator_list if "kernel" in ast.unparse(d)] for n in definitions}


def _text(node: ast.expr) -> str:
    return ast.unparse(node).replace("'", '"')
