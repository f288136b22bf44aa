"""Decide which variant `kernels` takes, on this machine or on one that is described."""

from __future__ import annotations

import platform
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version

from kernels import VariantRejected
from packaging.version import InvalidVersion, Version

from kernels_ext_npu.distribution.kernels_internals import need
from kernels_ext_npu.distribution.verification import Verified, parse_variant

CANN, CPU = need("kernels.backends.CANN"), need("kernels.backends.CPU")


@dataclass(frozen=True)
class Machine:
    """A Linux machine as the resolver sees it; without CANN it has no NPU."""

    torch: str
    cann: str | None
    arch: str

    def __str__(self) -> str:
        return f"torch {self.torch}, {f'CANN {self.cann}' if self.cann else 'no CANN'}, {self.arch}"


@dataclass(frozen=True)
class Decision:
    """The decision of the resolver about a variant; `rank` counts from 1, the variant that is taken."""

    variant: str
    rank: int | None
    reason: str


def describe(torch: str | None, cann: str | None, arch: str | None) -> Machine | None:
    """Return the machine that the given parts describe, None where none is given.

    A release of torch and an architecture that are not given are those of this machine; without `cann` it has no CANN.

    Raises:
        ValueError: what is given for torch or CANN is no version.
    """
    if torch is None and cann is None and arch is None:
        return None
    return Machine(
        _minor("torch", torch or version("torch")), cann and _minor("cann", cann), arch or platform.machine()
    )


def decide(variants: list[str], machine: Machine | None = None) -> list[Decision]:
    """Ask kernels' own resolver what it makes of the variants, and return its decisions, best first.

    It decides for this machine unless another is described. This machine is asked through torch: import softnpu first
    where it has no NPU.
    """
    parsed = []
    for name in variants:
        with suppress(ValueError):  # kernels passes over what it does not know, as we do
            parsed.append(parse_variant(name))
    if machine is None:
        accepted, trace = need("kernels.variants.resolve_variants")(parsed)
    else:
        accepted, trace = need("kernels.variants._resolve_variant_for_system")(
            variants=parsed,
            selected_backend=CANN(version=Version(machine.cann)) if machine.cann else CPU(),
            cpu=machine.arch,
            os="linux",
            torch_version=Version(machine.torch),
            torch_cxx11_abi=True,
            tvm_ffi_version=None,
        )
    ranks = {variant.variant_str: rank for rank, variant in enumerate(accepted, 1)}
    decisions = []
    for entry in trace:
        name = entry.variant.variant_str
        rank = ranks.get(name)
        fits = "taken" if rank == 1 else "fits"
        decisions.append(Decision(name, rank, entry.reason if isinstance(entry, VariantRejected) else fits))
    return sorted(decisions, key=lambda decision: (decision.rank or len(variants) + 1, decision.variant))


def decide_among(found: list[Verified], machine: Machine | None = None) -> list[Decision]:
    """Return the decisions about the variants among what was verified, as `decide` does."""
    return decide([entry.variant for entry in found if entry.is_variant], machine)


def this_machine() -> str:
    """Describe in words what the resolver sees here."""
    import sys

    import torch

    backend = need("kernels.backends._backend")()
    softnpu = sys.modules.get("softnpu")
    software = " (software device)" if softnpu is not None and softnpu.is_software() else ""
    cann = f"CANN {backend.version}{software}" if isinstance(backend, CANN) else f"backend {backend.name}"
    return f"torch {torch.__version__}, {cann}, {platform.machine()}"


def _minor(name: str, given: str) -> str:
    try:
        parsed = Version(given)
    except InvalidVersion as error:
        raise ValueError(f"--{name} {given}: not a version; expected is one such as 2.8 or 8.2") from error
    return f"{parsed.major}.{parsed.minor}"
