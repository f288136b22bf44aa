"""Make a kernel repository of few files, in a clone of its own, and read what a Hub holds of it."""

import shutil
import textwrap
from pathlib import Path

import build

from kernels_ext_npu.distribution.variants import names, write
from tests.localhub import LocalHub

REPO = "kernels-ext-npu/Tiny"
STRICT = "torch28-cxx11-cann82-aarch64-linux"
LAYERS = """
from torch import nn


class Doubled(nn.Module):
    can_torch_compile = True
    has_backward = True

    def forward(self, x):
        return x + x
"""


class Clone:
    """Hold a folder like a clone of the project, with one kernel repository of few files."""

    def __init__(self, root: Path) -> None:
        self.root, self.repository = root, root / "Tiny"
        self.source = self.repository / "torch-ext" / "tiny"
        self.source.mkdir(parents=True)
        self.write("build.toml", self.build_toml())
        self.write("README.md", "---\nlibrary_name: kernels\nlicense: apache-2.0\n---\n\n# Tiny\n")
        self.write("torch-ext/tiny/__init__.py", 'from . import layers\n\n__all__ = ["layers"]\n')
        self.write("torch-ext/tiny/layers.py", LAYERS)
        self.rebuild(STRICT)

    @staticmethod
    def build_toml(version: int = 1) -> str:
        return textwrap.dedent(f"""\
            [general]
            name = "tiny"
            version = {version}
            edition = 5
            license = "Apache-2.0"
            backends = ["cann"]

            [general.hub]
            repo-id = "{REPO}"

            [torch-noarch]
        """)

    def write(self, path: str, text: str) -> None:
        (self.repository / path).write_text(text)

    def rebuild(self, *strict: str) -> None:
        """Build torch-npu, torch-universal and these variants."""
        (self.root / "variants.toml").write_text(
            "".join(f'{name} = {{ torch_npu = "2.8.0", cann = "8.2.RC1" }}\n' for name in strict)
        )
        build.build(self.repository, self.root)
        shutil.rmtree(self.repository / "build")  # files in place of links, so that a test may change those of one
        write(build.render(self.repository, build.in_tree(self.root)), self.repository / "build")

    def built(self) -> dict[str, bytes]:
        """Path on the Hub -> content."""
        content = build.render(self.repository, names(self.root))
        return {f"build/{path}": content for path, content in content.items()}


def held(hub: LocalHub, branch: str, repo_id: str = REPO) -> dict[str, bytes] | None:
    """Return what a branch holds, path -> content, None where there is no such branch."""
    repository = hub.repository(repo_id)
    return repository.files(branch) if branch in repository.branches else None
