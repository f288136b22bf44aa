"""What a user meets on a machine that is not as it should be: a sentence that says what to do."""

import re
import warnings
from pathlib import Path

import pytest
from torch import nn
from transformers import AutoModelForCausalLM

import kernels_ext_npu
from kernels_ext_npu import UnsupportedEnvironmentError, environment
from kernels_ext_npu.binding import registration
from kernels_ext_npu.catalogue import REPOSITORIES


def test_a_forgotten_device_map_is_explained(registered, checkpoint) -> None:
    with pytest.warns(UserWarning, match="Qwen3ForCausalLM is on cpu.*device_map='npu'.*kernelize"):
        model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3"), use_kernels=True)
    assert not any(row.swapped for row in kernels_ext_npu.report(model))
    with pytest.raises(ValueError, match=r"the model is on cpu; move it first: model.to\('npu'\)"):
        kernels_ext_npu.kernelize(model)
    moved = kernels_ext_npu.kernelize(model.to("npu"))
    assert all(row.swapped for row in kernels_ext_npu.report(moved))


@pytest.mark.parametrize("function", ["kernelize", "report", "restore"])
def test_the_name_of_a_model_is_not_taken_for_one(function: str) -> None:
    sentence = rf"{function}: 'Qwen/Qwen3-8B' is a str, and a loaded model is needed: .*from_pretrained"
    with pytest.raises(TypeError, match=sentence):
        getattr(kernels_ext_npu, function)("Qwen/Qwen3-8B")


def test_a_function_that_is_gone_says_so_and_what_to_do_without_it() -> None:
    assert not hasattr(kernels_ext_npu, "transpose_experts")
    with pytest.raises(AttributeError, match=r"transpose_experts is gone: .* Leave the call out"):
        kernels_ext_npu.transpose_experts  # noqa: B018


def test_a_mode_that_is_none_is_explained() -> None:
    with pytest.raises(TypeError, match=r"mode must be a kernels.Mode, such as kernels.Mode.TRAINING, got 'training'"):
        kernels_ext_npu.kernelize(nn.Linear(2, 2).to("npu"), mode="training")  # type: ignore[arg-type]


# None: no file that names one
CANN = {
    None: ["'not known'", "ASCEND_HOME_PATH", "set_env.sh"],
    "10.0.0": ["CANN 10.0.0", "one digit before the dot"],
    "": ["''", "ASCEND_HOME_PATH"],
    "8.2.RC1": [],
    "8.5.0": [],
    "9.1.0-beta.1": [],
}


def test_a_version_of_cann_that_kernels_cannot_read_is_explained(run_forked, tmp_path: Path) -> None:
    """Those that exist are fine."""
    for number, (version, words) in enumerate(CANN.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        if version is not None:
            (folder / "ascend_toolkit_install.info").write_text(f"version={version}\n")
        code = f"import os, softnpu, kernels_ext_npu; os.environ['ASCEND_HOME_PATH'] = {str(folder)!r}; "
        result = run_forked(f"{code}kernels_ext_npu.register()", check=False)
        assert bool(result.returncode) == bool(words), (version, result.stderr)
        assert ("UnsupportedEnvironmentError" in result.stderr) == bool(words), version
        for word in words:
            assert word in result.stderr, version
        assert "During handling" not in result.stderr, version


REGISTER = "import kernels_ext_npu; kernels_ext_npu.register()"
OTHER_KERNELS = """
import softnpu
from transformers.utils import import_utils
import_utils.is_kernels_available = lambda: False
import_utils.KERNELS_MIN_VERSION, import_utils.KERNELS_MAX_VERSION = "0.18.2", "0.19.0"
"""
NO_CANN = ["torch_npu cannot be imported: libhccl.so", "set_env.sh", "import softnpu"]
# whether in a fresh process, without the software device; what is done there, with which variables, and what is said
MACHINES: dict[str, tuple[bool, str, dict[str, str], list[str]]] = {
    "no torch_npu": (
        True,
        "import sys; sys.modules['torch_npu'] = None\n",
        {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        ["torch_npu is not installed", "pip install --no-deps torch_npu"],
    ),
    "no CANN": (True, "", {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, NO_CANN),
    "no CANN, which torch looks for": (True, "", {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}, NO_CANN),
    "kernels that do not fit": (
        False,
        OTHER_KERNELS,
        {},
        [
            "takes kernels >= 0.18.2, < 0.19.0 and ignores the installed 0.17",
            "pip install 'kernels>=0.18.2,<0.19.0'",
            "pip install 'transformers==5.22.2' 'kernels==0.17.2'",
        ],
    ),
    "kernels switched off": (False, "import softnpu\n", {"USE_HUB_KERNELS": "NO"}, ["USE_HUB_KERNELS"]),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_what_is_missing_is_explained(run_python, run_forked, machine: str) -> None:
    is_fresh, code, variables, words = MACHINES[machine]
    run = run_python if is_fresh else run_forked
    result = run(code + REGISTER, check=False, **variables)
    for word in words:
        assert word in result.stderr


@pytest.mark.parametrize(
    ("package", "found"), [("transformers", "5.25.0"), ("kernels", "0.16.2"), ("kernels", "0.18.2")]
)
def test_versions_that_nobody_tried_are_named(monkeypatch, package, found) -> None:
    version = environment.installed
    monkeypatch.setattr(environment, "installed", lambda name: found if name == package else version(name))
    with pytest.warns(UserWarning, match=f"tested with {package} .*, found {found}"):
        environment.check()


def test_a_package_that_is_missing_is_named(monkeypatch) -> None:
    version = environment.installed
    monkeypatch.setattr(environment, "installed", lambda name: None if name == "kernels" else version(name))
    with pytest.raises(UnsupportedEnvironmentError, match="kernels is not installed: pip install 'kernels"):
        environment.check()


def test_the_installed_versions_are_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        environment.check()


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("/nowhere", f"/nowhere has no {', '.join(f'{name}/build' for name in REPOSITORIES)}."),
        ("bundle", 'did you mean "bundled"?'),
        ("Hub", 'did you mean "hub"?'),
    ],
)
@pytest.mark.parametrize("is_registered", [False, True])
def test_a_source_that_holds_no_kernels_is_named_and_changes_nothing(source: str, wrong: str, is_registered) -> None:
    if is_registered:
        kernels_ext_npu.register()
    before = registration.current
    assert (before is not None) == is_registered
    message = re.escape(f'source={source!r}: {wrong} A source is "bundled", "hub", or the path')
    with pytest.raises(FileNotFoundError, match=message):
        kernels_ext_npu.register(source=source)
    assert registration.current is before


def test_unknown_attributes_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'regster'"):
        kernels_ext_npu.regster  # noqa: B018
