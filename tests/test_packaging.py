"""The distribution: what `pip install .` gives, and that its versions are the tested ones."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import build
import pytest
from hatchling.builders.sdist import SdistBuilder
from packaging.requirements import Requirement

from kernels_ext_npu import __version__, environment
from kernels_ext_npu.distribution.sources import ORGANISATION
from kernels_ext_npu.distribution.variants import names, repositories

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements(lines: list[str]) -> dict[str, Requirement]:
    """Those that hold for this Python, by name."""
    parsed = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {r.name: r for r in parsed if r.marker is None or r.marker.evaluate()}


RANGES = requirements([*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["plot"]])
PINS = requirements((ROOT / "requirements.txt").read_text().splitlines())


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", *map(str, arguments), "--no-deps", "--no-index", "-q"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", ROOT, "--no-build-isolation", "--wheel-dir", folder)
    (path,) = folder.glob("kernels_ext_npu-*.whl")
    return path


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    pip("install", wheel, "--target", folder, "--no-compile")  # four thousand files
    return folder


def run(site: Path, *command: str) -> str:
    """Outside the project, with the installed package only, behind a proxy that is dead."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ASCEND_", "HF_"))}
    environment |= {"PYTHONPATH": str(site), "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment |= {"HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"}
    result = subprocess.run(command, cwd=site.parent, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def content(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_holds_both_packages_and_every_variant(wheel: Path) -> None:
    held = content(wheel)
    assert {name: data for name, data in held.items() if "/bundled/" in name} == {
        f"kernels_ext_npu/bundled/{repository.name}/build/{path}": data
        for repository in repositories(ROOT)
        for path, data in build.render(repository, names(ROOT)).items()
    }
    assert {"kernels_ext_npu/cli/__init__.py", "softnpu/ascendcl.c", "softnpu/formulas/norm.py"} <= held.keys()
    assert {"kernels_ext_npu/troubleshooting.md", "kernels_ext_npu/py.typed", "softnpu/py.typed"} <= held.keys()
    assert {name.partition("/")[0] for name in held} == {
        "kernels_ext_npu",
        "softnpu",
        f"kernels_ext_npu-{__version__}.dist-info",
    }


def test_the_wheel_names_the_organisation_of_the_kernels(wheel: Path) -> None:
    metadata = content(wheel)[f"kernels_ext_npu-{__version__}.dist-info/METADATA"].decode()
    assert f"\nProject-URL: Hugging Face, https://huggingface.co/{ORGANISATION}\n" in metadata


def test_the_source_distribution_gives_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    (source,) = SdistBuilder(str(ROOT)).build(directory=str(tmp_path))
    pip("wheel", source, "--no-build-isolation", "--wheel-dir", tmp_path)
    assert content(tmp_path / wheel.name) == content(wheel)


def test_the_installed_package_says_its_version(site: Path) -> None:
    assert run(site, str(site / "bin" / "kernels-ext-npu"), "--version").strip() == __version__


@pytest.mark.long
@pytest.mark.software
def test_the_installed_kernels_are_tested_without_network_or_clone(site: Path) -> None:
    command = [str(site / "bin" / "kernels-ext-npu"), "selftest", "--quick", "--only", "RMSNorm, "]
    assert "On the software device, no card: all 12 agree." in run(site, sys.executable, "-m", "softnpu", *command)


def test_the_tested_set_is_within_the_declared_ranges() -> None:
    for name, requirement in RANGES.items():
        (pin,) = PINS[name].specifier
        assert requirement.specifier.contains(pin.version), name


def test_the_ranges_that_are_checked_at_run_time_are_the_declared_ones() -> None:
    """But for kernels 0.18, which transformers from 5.23 on wants: it may be installed, and is warned of."""
    tested = dict(environment.TESTED)
    assert RANGES["transformers"].specifier == tested["transformers"]
    for version, is_tested, is_declared in (("0.17.2", 1, 1), ("0.18.2", 0, 1), ("0.16.2", 0, 0), ("0.19.0", 0, 0)):
        assert tested["kernels"].contains(version) == is_tested
        assert RANGES["kernels"].specifier.contains(version) == is_declared
