"""Checks CANN: which version is there, where from, and what `kernels` makes of it."""

from __future__ import annotations

import re
from typing import Any

from kernels_ext_npu import environment
from kernels_ext_npu.doctor.findings import Finding, not_checked, ok, problem, warning
from kernels_ext_npu.doctor.known_errors import NO_CANN, SET_ENV
from kernels_ext_npu.doctor.observations import SOFTWARE_CANN, Observations, scripts
from kernels_ext_npu.doctor.probes.imports import CANN

UNREADABLE = "InvalidVersion: Invalid version"


def cann(seen: Observations) -> Finding:
    """Check which CANN is there, where, and how `kernels` reads its version."""
    named, places = seen.named_cann, seen.cann_places
    if seen.torch.hung and seen.torch.step == CANN:
        return problem(
            "torch_npu reads its version without an end",
            advice="It looks through every folder below ASCEND_HOME_PATH or, where that is not set, below the current "
            "folder. Source the script of CANN.",
            commands=seen.cann_scripts or SET_ENV,
        )
    if named is not None and not named["exists"]:
        return problem(
            f"ASCEND_HOME_PATH is {named['path']}, which is no folder",
            advice="Source the script of the CANN that is installed; without one, unset ASCEND_HOME_PATH.",
            commands=seen.cann_scripts or SET_ENV,
            see="ASCEND_OPP_PATH environment variable is not set",
        )
    if named is None and places and not seen.torch_npu_works:
        versions = ", ".join(dict.fromkeys(place["version"] for place in places))
        return problem(
            f"{versions} on disk, but its environment is not set up",
            details=tuple(f"{place['version']} in {place['path']}" for place in places),
            advice="Source its script in the shell that starts Python, or in the script of the job.",
            commands=scripts(places[:1]) or seen.cann_scripts or SET_ENV,
            see=NO_CANN,
        )
    return _absent(seen) if seen.cann is None and named is None else _read(seen)


def facts(seen: Observations) -> dict[str, Any]:
    """Return the version, how `kernels` reads it, and where CANN is."""
    return {
        "version": seen.cann,
        "kernels_reads": seen.cann and as_kernels_reads(seen.cann),
        "ASCEND_HOME_PATH": seen.named_cann and seen.named_cann["path"],
        "places": seen.cann_places,
    }


def as_kernels_reads(found: str) -> str | None:
    """Return the first and the third character, as `kernels` does; None where these make no version."""
    characters = found[:3]
    return f"{characters[0]}.{characters[2]}" if re.fullmatch(r"\d.\d", characters) else None


def _read(seen: Observations) -> Finding:
    named = seen.named_cann
    found = seen.cann or "not known"  # what torch_npu makes of a folder without a file that names it
    place = f" in {named['path']}" if named else ""
    refusal = environment.refuse_cann(found)
    if refusal is not None:
        unknown = not re.match(r"\d", found)
        readable = [other for other in seen.cann_places if environment.refuse_cann(other["version"]) is None]
        return problem(
            f"version {f'unknown ({found!r})' if unknown else found}{place}, and kernels cannot read it",
            details=(f"it is read from {named['info']}",) if named and named["info"] else (),
            advice=refusal,
            commands=(scripts(readable) or SET_ENV) if unknown else (),
            see=UNREADABLE,
        )
    read, true = as_kernels_reads(found), re.match(r"(\d+)\.(\d+)", found)
    if read and true and read != f"{int(true[1])}.{int(true[2])}":
        return warning(
            f"{found}{place}, which kernels reads as {read}",
            advice=f"kernels takes single digits, and would take a variant for CANN {read}. "
            "The variants torch-npu and torch-universal fit every CANN.",
            see=UNREADABLE,
        )
    return ok(f"{found}{place}; kernels reads {read}")


def _absent(seen: Observations) -> Finding:
    if seen.disk.failure:
        return not_checked(f"its files could not be read: {seen.disk.failure}")
    if seen.expects_a_card:
        return problem(
            "not found: ASCEND_HOME_PATH is not set, and it is in none of its usual folders",
            advice="Install CANN, or source the script of the one that is installed elsewhere.",
            commands=SET_ENV,
            see=NO_CANN,
        )
    if seen.software:
        return ok(f"none, and none is needed: the software device stands for {SOFTWARE_CANN}")
    return not_checked("none found; the software device needs none")
