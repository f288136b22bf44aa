"""The hook of hatchling that puts all variants of every kernel repository into the wheel."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "integration"))  # nothing of the package is installed where it is built

from kernels_ext_npu.distribution.variants import all_variants, repositories, write  # noqa: E402


class BundledKernels(BuildHookInterface):
    """Packs the kernels as files. An editable installation finds the repositories beside the package instead."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add ``kernels_ext_npu/bundled/<repository>/build`` of each repository to a wheel.

        Raises:
            ValueError: a repository was not built.
        """
        if version == "editable":
            return
        self._folder = tempfile.TemporaryDirectory(prefix="kernels-ext-npu-")
        for repository in repositories(ROOT):
            build = Path(self._folder.name) / repository.name / "build"
            write(all_variants(repository), build)
            build_data["force_include"][str(build)] = f"kernels_ext_npu/bundled/{repository.name}/build"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was made for the wheel."""
        if version != "editable":
            self._folder.cleanup()
