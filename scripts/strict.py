"""Read the strict variants, as ``variants.toml`` names them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Strict:
    """Name a variant, the torch_npu release that it is proven on, and the CANN release that this was made for."""

    name: str
    torch_npu: str
    cann: str

    @property
    def prefix(self) -> str:
        """Write how the name has to begin, as `kernels` writes releases: torch210-cxx11-cann90 for 2.10 and 9.0."""
        torch, cann = (Version(version) for version in (self.torch, self.cann))
        return f"torch{torch.major}{torch.minor}-cxx11-cann{cann.major}{cann.minor}-"

    @property
    def torch(self) -> str:
        """Return the release of torch that the release of torch_npu extends: 2.7.1 for 2.7.1.post2."""
        return Version(self.torch_npu).base_version


def strict_variants(root: Path) -> list[Strict]:
    """Read those of a clone, in the order of the file.

    Raises:
        ValueError: a line of the file is not as it has to be.
    """
    variants = []
    for name, table in tomllib.loads((root / "variants.toml").read_text()).items():
        if not isinstance(table, dict) or set(table) != {"torch_npu", "cann"}:
            raise ValueError(
                f'variants.toml: {name} must be written as {name} = {{ torch_npu = "2.6.0", cann = "8.2.RC1" }}'
            )
        variants.append(Strict(name, **table))
        if not name.startswith(variants[-1].prefix):
            raise ValueError(f"variants.toml: {name} must begin with {variants[-1].prefix}, by its torch_npu and cann")
    return variants
