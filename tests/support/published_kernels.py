"""The kernels as they are published, on a Hub on loopback."""

from __future__ import annotations

from collections.abc import Sequence

from kernels_ext_npu import catalogue
from kernels_ext_npu.distribution import sources
from tests.localhub import LocalHub


def publish(
    hub: LocalHub, card: str, names: Sequence[str] = catalogue.REPOSITORIES, variants: str = "torch-npu"
) -> dict[str, str]:
    """Publish all repositories, or those named, with some variants; return the commits of their versions."""
    others = {"README.md": f"# {card}".encode(), "benchmarks/large.bin": bytes(2**20)}
    return {name: hub.publish(f"kernels-ext-npu/{name}", built(name, variants) | others) for name in names}


def built(name: str, variants: str = "torch-npu") -> dict[str, bytes]:
    """Return the files of some variants of a kernel: path in its repository -> content."""
    root = sources.root("bundled") / name
    paths = [path for path in (root / "build").glob(f"{variants}/**/*") if path.is_file() and path.suffix != ".pyc"]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}
