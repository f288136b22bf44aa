"""Where the kernels come from: the copies in this package, a clone of the project, or the Hub."""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kernels_ext_npu.catalogue import REPOSITORIES
from kernels_ext_npu.environment import choices

if TYPE_CHECKING:
    from types import ModuleType

    from kernels import LayerRepository, LocalLayerRepository

ORGANISATION = "kernels-ext-npu"
VERSION = 1  # the version of the kernels' interface: the branch v1 on the Hub
_SOURCES = 'A source is "bundled", "hub", or the path of a clone of kernels-ext-npu.'


def layer_sources(
    source: str | Path, layers: Mapping[str, str]
) -> Mapping[str, LayerRepository | LocalLayerRepository]:
    """Return the entries of the mapping for layers, each with its kernel repository, from a source."""
    from kernels import LayerRepository, LocalLayerRepository

    if source == "hub":
        hub = {layer: f"{ORGANISATION}/{repository}" for layer, repository in layers.items()}
        return {
            layer: LayerRepository(name, layer_name=layer, version=VERSION, trust_remote_code=[name])
            for layer, name in hub.items()
        }
    folder = root(source)
    return {layer: LocalLayerRepository(folder / name, layer_name=layer) for layer, name in layers.items()}


def load(kernel: str, source: str | Path = "bundled") -> ModuleType:
    """Load the package of a kernel, to call its functions as its card describes them.

    Args:
        kernel: the name of its repository, such as "RMSNorm" or "kernels-ext-npu/RMSNorm".
        source: "bundled" for the copy in this package, which needs no network, "hub", or the path of a clone of the
            project.

    Returns:
        The package, with its functions and ``layers``, as ``kernels.get_kernel`` returns it.

    Raises:
        ValueError: there is no such kernel.
        FileNotFoundError: the source does not hold it.
        TypeError: the source is neither text nor a path.

    Example:
        >>> import softnpu  # before torch, on a machine without an NPU
        >>> import torch, kernels_ext_npu
        >>> rmsnorm = kernels_ext_npu.load("RMSNorm")
        >>> x, weight = torch.randn(2, 64, device="npu"), torch.ones(64, device="npu")
        >>> rmsnorm.rms_norm(x, weight, 1e-6).shape
        torch.Size([2, 64])
    """
    by_name = {name.lower(): name for name in REPOSITORIES}
    name = str(kernel).lower().removeprefix(f"{ORGANISATION}/")
    if name not in by_name:
        raise ValueError(f"there is no kernel {kernel!r}: {choices(name, REPOSITORIES)}")
    check(source, [by_name[name]])
    return load_package(source, by_name[name])


def load_package(source: str | Path, repository: str) -> ModuleType:
    """Load the package of a kernel repository from a source, for what it exports beside layers."""
    if source == "hub":
        from kernels import get_kernel

        name = f"{ORGANISATION}/{repository}"
        return get_kernel(name, version=VERSION, trust_remote_code=[name])
    return _load_local(root(source) / repository)


@functools.cache
def _load_local(folder: Path) -> ModuleType:
    """Load the package of a repository in a folder; `kernels` imports it once, and chooses among its variants anew."""
    from kernels import get_local_kernel

    return get_local_kernel(folder)


def check(source: str | Path, repositories: Collection[str]) -> None:
    """Raise if a source cannot hold the repositories; the Hub is asked when a kernel is loaded."""
    if source == "hub":
        return
    folder = root(source)
    missing = [f"{name}/build" for name in sorted(repositories) if not (folder / name / "build").is_dir()]
    near = difflib.get_close_matches(str(source).lower(), ("bundled", "hub"), n=1)
    if missing:
        wrong = (
            f'did you mean "{near[0]}"?' if near and not folder.exists() else f"{folder} has no {', '.join(missing)}."
        )
        raise FileNotFoundError(f"source={str(source)!r}: {wrong} {_SOURCES}")


def root(source: str | Path) -> Path:
    """Return the folder with the kernel repositories of a source other than the Hub.

    The bundled ones are inside the installed package, and in a clone beside it: the package is built from them.
    """
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f"source={source!r} is neither text nor a path. {_SOURCES}")
    if source != "bundled":
        return Path(source).expanduser().resolve()
    package = Path(__file__).parent.parent
    return package / "bundled" if (package / "bundled").is_dir() else package.parent.parent
