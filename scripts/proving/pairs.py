"""Choose what is proven where: a pair of torch and torch_npu, and the strict variants that run on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from proving import ProvingError
from strict import Strict

# releases that torch_npu's table does not name: they run with the variant that `kernels` takes for them
BEYOND = "2.11.0=2.11.0.post3 2.12.0=2.12.0.post3 2.13.0 2.14.0"


@dataclass(frozen=True)
class Proof:
    """Name a variant, a pair of releases to run it on, and a release of CANN."""

    variant: str
    torch: str
    torch_npu: str
    cann: str

    @property
    def name(self) -> str:
        """Write what no other proof is called."""
        return f"{self.variant} {self.torch_npu}"


def proofs(variants: Sequence[Strict], pairs: str = "") -> list[Proof]:
    """List what `variants.toml` names, and BEYOND; with pairs, as ``2.6.0 2.8.0=2.8.0.post5``, those alone.

    A pair is TORCH=TORCH_NPU, or TORCH where both have one version. It proves the variants that name its torch_npu, or
    if none does, all that `kernels` takes for its torch: those of its minor release, or ``torch-npu`` with the newest
    CANN where there is none.

    Raises:
        ProvingError: a pair is no pair.
    """
    if not pairs.split():
        named = [Proof(strict.name, strict.torch, strict.torch_npu, strict.cann) for strict in variants]
        return named + proofs(variants, BEYOND)
    newest = max((strict.cann for strict in variants), key=Version)
    found = []
    for torch, torch_npu in map(_pair, pairs.split()):
        chosen = [strict for strict in variants if strict.torch_npu == torch_npu]
        chosen = chosen or [strict for strict in variants if _minor(strict.torch) == _minor(torch)]
        taken = [(strict.name, strict.cann) for strict in chosen] or [("torch-npu", newest)]
        found += [Proof(name, torch, torch_npu, cann) for name, cann in taken]
    return found


def _minor(torch: str) -> str:
    return f"{Version(torch).major}.{Version(torch).minor}"


def _pair(text: str) -> tuple[str, str]:
    torch, _, torch_npu = text.partition("=")
    torch_npu = torch_npu or torch
    try:
        fits = Version(torch_npu).base_version == str(Version(torch))
    except InvalidVersion:
        fits = False
    if not fits:
        raise ProvingError(
            f"{text}: a pair is TORCH=TORCH_NPU, such as 2.8.0=2.8.0.post5, or TORCH alone; torch_npu {torch_npu} "
            f"does not extend torch {torch}"
        )
    return torch, torch_npu
