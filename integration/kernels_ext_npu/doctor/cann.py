"""Checks CANN: which version is there, where from, and what `kernels` makes of it."""

from __future__ import annotations

import re
from typing import Any

from kernels_ext_npu import environment
from kernels_ext_npu.doctor.findings import Finding, not_checked, ok, problem, warning
from kernels_ext_npu.doctor.known_errors import SET_ENV
from kernels_ext_npu.doctor.observations import SOFTWARE_CANN, Observations
from kernels_ext_npu.doctor.torch_probe import CANN

NAME, UNREADABLE = "CANN", "InvalidVersion: Invalid version"


def cann(seen: Observations) -> Finding:
    """Check which CANN is there, where, and how `kernels` reads its version."""
    named = seen.disk.facts.get("ASCEND_HOME_PATH")
    named = None if named and named["software"] else named
    facts: dict[str, Any] = {"version": seen.cann, "kernels_reads": seen.cann and as_kernels_reads(seen.cann)}
    facts |= {"ASCEND_HOME_PATH": named and named["path"], "places": seen.cann_places}
    if seen.torch.hung and seen.torch.step == CANN:
        return problem(
            NAME,
            "torch_npu reads its version without an end",
            advice="It looks through every folder below ASCEND_HOME_PATH or, where that is not set, below the current "
            "folder. Source the script of CANN.",
            commands=_scripts(seen.cann_places) or SET_ENV,
            facts=facts,
        )
    if named is not None and not named["exists"]:
        return problem(
            NAME,
            f"ASCEND_HOME_PATH is {named['path']}, which is no folder",
            advice="Source the script of the CANN that is installed; without one, unset ASCEND_HOME_PATH.",
            commands=_scripts(seen.cann_places) or SET_ENV,
            see="ASCEND_OPP_PATH environment variable is not set",
            facts=facts,
        )
    if named is None and seen.cann_places and not seen.torch_npu_works:
        return _not_sourced(seen, facts)
    if seen.cann is None and named is None:
        return _absent(seen, facts)
    return _read(seen, named, facts)


def as_kernels_reads(found: str) -> str | None:
    """Return the first and the third character, as `kernels` does; None where these make no version."""
    characters = found[:3]
    return f"{characters[0]}.{characters[2]}" if re.fullmatch(r"\d.\d", characters) else None


def _read(seen: Observations, named: dict[str, Any] | None, facts: dict[str, Any]) -> Finding:
    found = seen.cann
    place = f" in {named['path']}" if named else ""
    if found is None:
        found = "not known"  # what torch_npu makes of a folder without a file that names it
    refusal = environment.refuse_cann(found)
    if refusal is not None:
        unknown = not re.match(r"\d", found)
        scripts = _scripts([other for other in seen.cann_places if environment.refuse_cann(other["version"]) is None])
        return problem(
            NAME,
            f"version {found if not unknown else f'unknown ({found!r})'}{place}, and kernels cannot read it",
            details=(f"it is read from {named['info']}",) if named and named["info"] else (),
            advice=refusal,
            commands=(scripts or SET_ENV) if unknown else (),
            see=UNREADABLE,
            facts=facts,
        )
    read, true = as_kernels_reads(found), re.match(r"(\d+)\.(\d+)", found)
    if read and true and read != f"{int(true[1])}.{int(true[2])}":
        return warning(
            NAME,
            f"{found}{place}, which kernels reads as {read}",
            advice=f"kernels takes single digits, and would take a variant for CANN {read}. "
            "The variants torch-npu and torch-universal fit every CANN.",
            see=UNREADABLE,
            facts=facts,
        )
    return ok(NAME, f"{found}{place}; kernels reads {read}", facts=facts)


def _not_sourced(seen: Observations, facts: dict[str, Any]) -> Finding:
    places = seen.cann_places
    return problem(
        NAME,
        f"{', '.join(dict.fromkeys(place['version'] for place in places))} on disk, but its environment is not set up",
        details=tuple(f"{place['version']} in {place['path']}" for place in places),
        advice="Source its script in the shell that starts Python, or in the script of the job.",
        commands=_scripts(places[:1]) or _scripts(places) or SET_ENV,
        see="libhccl.so: cannot open shared object file",
        facts=facts,
    )


def _absent(seen: Observations, facts: dict[str, Any]) -> Finding:
    if seen.disk.failure:
        return not_checked(NAME, f"its files could not be read: {seen.disk.failure}", facts=facts)
    if seen.expects_a_card:
        return problem(
            NAME,
            "not found: ASCEND_HOME_PATH is not set, and it is in none of its usual folders",
            advice="Install CANN, or source the script of the one that is installed elsewhere.",
            commands=SET_ENV,
            see="libhccl.so: cannot open shared object file",
            facts=facts,
        )
    if seen.software:
        return ok(NAME, f"none, and none is needed: the software device stands for {SOFTWARE_CANN}", facts=facts)
    return not_checked(NAME, "none found; the software device needs none", facts=facts)


def _scripts(places: list[dict[str, Any]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(f"source {place['set_env']}" for place in places if place["set_env"]))
