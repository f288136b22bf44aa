"""make release: what it refuses, and that the files it leaves work where nothing else is installed."""

import shutil
import subprocess
import sys
from pathlib import Path

import build
import pytest

from kernels_ext_npu import __version__
from releasing import ReleaseError, artifacts, trial

FILES = [f"kernels_ext_npu-{__version__}-py3-none-any.whl", f"kernels_ext_npu-{__version__}.tar.gz"]


def git(tree: Path, *arguments: str) -> None:
    author = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    subprocess.run(["git", "-C", str(tree), *author, *arguments], check=True, capture_output=True)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small tree that is one commit: the package with one kernel repository."""
    root, ignored = tmp_path / "tree", shutil.ignore_patterns("__pycache__")
    for name in ("integration", "scripts", "softnpu", "RMSNorm"):
        shutil.copytree(build.ROOT / name, root / name, ignore=ignored)
    for name in ("CHANGELOG.md", "docs/troubleshooting.md", "LICENSE", "README.md", "pyproject.toml", "variants.toml"):
        (root / name).parent.mkdir(exist_ok=True)
        shutil.copy(build.ROOT / name, root / name)
    git(root, "init", "-q")
    git(root, "add", "--all")
    git(root, "commit", "-q", "-m", "all")
    return root


def release(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(tree / "scripts" / "release.py"), "--output", str(tree.parent / "dist"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_tree_that_is_not_its_commit_is_refused(tree: Path) -> None:
    (tree / "integration" / "forgotten.py").touch()
    result = release(tree)
    assert result.returncode == 1
    assert "1 files are changed or not in git, such as integration/forgotten.py" in result.stderr
    assert not (tree.parent / "dist").exists()


def test_a_version_without_its_section_is_refused(tree: Path) -> None:
    changelog = tree / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace(f"## {__version__}", "## 99.0"))
    with pytest.raises(ReleaseError, match=r"the newest section of CHANGELOG\.md is 99\.0: write one that begins with"):
        artifacts.version(tree)


def test_a_build_that_differs_from_the_last_is_refused(tree: Path, tmp_path: Path) -> None:
    hook = tree / "scripts" / "hatch_build.py"
    planted = "        import uuid; (build := Path(self._folder.name) / 'id').write_text(str(uuid.uuid4()))\n"
    planted += "        build_data['force_include'][str(build)] = 'kernels_ext_npu/id'\n"
    marker = "        for repository in repositories(ROOT):\n"
    assert marker in hook.read_text()
    hook.write_text(hook.read_text().replace(marker, planted + marker))
    git(tree, "commit", "-qam", "planted")
    with pytest.raises(ReleaseError, match=r"two builds of kernels_ext_npu.*\.whl from one commit differ"):
        artifacts.build(tree, artifacts.require_clean(tree), tmp_path / "here")


def test_a_quick_start_that_the_trial_cannot_run_is_refused() -> None:
    assert "use_kernels=True" in trial.quick_start((build.ROOT / "README.md").read_text())
    with pytest.raises(ReleaseError, match="has no example that loads Qwen/Qwen3-8B"):
        trial.quick_start("```python\nAutoModel.from_pretrained('other')\n```")


@pytest.mark.long
def test_a_release_works_where_nothing_else_is_installed(tmp_path: Path) -> None:
    """The commit of the project, from a clone; a module that the wheel lacks ends it, and no file is left."""
    tree = tmp_path / "tree"
    git(build.ROOT, "clone", "-q", str(build.ROOT), str(tree))
    result = release(tree, "--pythons", sys.executable)
    assert result.returncode == 0, result.stdout + result.stderr
    assert sorted(path.name for path in (tmp_path / "dist").iterdir()) == FILES
    assert result.stdout.count("holds") == 2 * 5  # install, --version, quick start, doctor and self-test of each file

    shutil.rmtree(tmp_path / "dist")
    project = tree / "pyproject.toml"
    project.write_text(project.read_text().replace(', "softnpu"]', "]", 1))
    git(tree, "commit", "-qam", "without the software device")
    result = release(tree, "--pythons", sys.executable)
    assert result.returncode == 1
    assert "No module named softnpu" in result.stdout
    assert not (tmp_path / "dist").exists()
