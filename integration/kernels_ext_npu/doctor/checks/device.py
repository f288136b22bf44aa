"""Checks CANN and the card, finds out why one is not there, or checks the software device in their place."""

from __future__ import annotations

import re

from kernels_ext_npu import environment
from kernels_ext_npu.doctor.findings import Finding, explained, not_checked, ok, problem, remedy, warning
from kernels_ext_npu.doctor.observations import SOFTWARE_CANN, Observations, scripts
from kernels_ext_npu.doctor.probes import CANN, DEVICE, DEVICES, SOFTNPU
from kernels_ext_npu.machine.cann_releases import parse_release, sentences

INVISIBLE = "none visible to torch_npu"
VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"


def device(seen: Observations) -> Finding:
    """Check that there are NPUs, or the software device in their place."""
    if seen.devices:
        return _visible(seen)
    asked = seen.torch_npu_works or seen.torch.step == DEVICES
    chosen, signs = seen.environment.get(VISIBLE), tuple(f"there is {sign}" for sign in seen.signs_of_hardware)
    if asked and chosen is not None:
        return problem(INVISIBLE, details=(*signs, *_failures(seen)), **remedy("devices chosen", chosen=chosen))
    if (asked or signs) and seen.disk.facts.get("closed"):
        closed = f"{', '.join(seen.disk.facts['closed'])} may not be opened by this user"
        return problem(closed, **remedy("device nodes closed"))
    if asked and (seen.driver_failure or seen.nodes):
        told = remedy("driver")
        if not seen.driver_failure:
            told["advice"] = explained(seen.torch.errors, told["advice"])["advice"]
        return problem(INVISIBLE, details=(*signs, *_failures(seen)), **told)
    if asked:
        return problem(INVISIBLE, details=(*signs, *_failures(seen)), **remedy("no device nodes"))
    if signs and seen.driver_failure:
        return problem(f"npu-smi info: {seen.driver_failure}", details=signs, **remedy("driver"))
    if signs and not seen.nodes:
        missing = "a card is meant to be here, but there is no /dev/davinci*"
        return problem(missing, details=signs, **remedy("no device nodes"))
    if signs:
        return not_checked(f"torch_npu cannot be asked; there is {'; '.join(seen.signs_of_hardware)}")
    if seen.expects_a_card:
        works = seen.use is not None and seen.use.passed(DEVICE) and seen.software
        details = ("the software device works here",) if works else ()
        return problem("no sign of a card, but CANN is set up or installed", details=details, **remedy("no card"))
    return _software(seen)


def _visible(seen: Observations) -> Finding:
    names, chosen = seen.torch.facts.get("names"), seen.environment.get(VISIBLE)
    found = f"{seen.devices} × {names[0]}" if names else f"{seen.devices} found, which do not tell their names"
    details = [f"{VISIBLE}={chosen}, of {len(seen.nodes)}"] if chosen and seen.nodes else []
    if seen.driver_failure:
        details.append(f"but {seen.disk.facts['npu_smi']['program']}: {seen.driver_failure}")
    return ok(found, details=tuple(details))


def _failures(seen: Observations) -> list[str]:
    """List how torch_npu failed where it counted devices, and the driver's tool."""
    failures = [seen.torch.failure.splitlines()[0]] if seen.torch.failure else []
    return failures + ([f"npu-smi info: {seen.driver_failure}"] if seen.driver_failure else [])


def _software(seen: Observations) -> Finding:
    """Check the software device, where there is neither a card nor a sign of one."""
    if seen.use is None or not (seen.use.passed(SOFTNPU) or seen.software_failed_by_itself):
        return not_checked("no NPU here, and torch_npu does not work with the software device")
    if seen.use.passed(DEVICE):
        details = ("right for development and tests; it says nothing about speed",)
        return ok("no NPU here: the software device is used", details=details)
    said = seen.use.errors[0].splitlines()[0] if seen.software_failed_by_itself else seen.use.cause
    return seen.use.problem(f"no NPU here, and no software device: {said}")


def cann(seen: Observations) -> Finding:
    """Check which CANN is there, where, and how `kernels` reads its version."""
    named, places = seen.named_cann, seen.cann_places
    if seen.torch.hung and seen.torch.step == CANN:
        return problem("torch_npu reads its version without an end", **remedy("CANN hangs", *scripts(seen.cann_places)))
    if named is not None and not named["exists"]:
        said = f"ASCEND_HOME_PATH is {named['path']}, which is no folder"
        return problem(said, **remedy("CANN's folder is none", *scripts(seen.cann_places)))
    if named is None and places and not seen.torch_npu_works:
        versions = ", ".join(dict.fromkeys(place["version"] for place in places))
        return problem(
            f"{versions} on disk, but its environment is not set up",
            details=tuple(f"{place['version']} in {place['path']}" for place in places),
            **remedy("CANN on disk", *(scripts(places[:1]) or scripts(places))),
        )
    return _absent(seen) if seen.cann is None and named is None else _read(seen)


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
        case, commands = ("CANN's version is unknown", scripts(readable)) if unknown else ("CANN cannot be read", ())
        return problem(
            f"version {f'unknown ({found!r})' if unknown else found}{place}, and kernels cannot read it",
            details=(f"it is read from {named['info']}",) if named and named["info"] else (),
            **remedy(case, *commands, refusal=refusal),
        )
    read, true = as_kernels_reads(found), re.match(r"(\d+)\.(\d+)", found)
    if read and true and read != f"{int(true[1])}.{int(true[2])}":
        return warning(f"{found}{place}, which kernels reads as {read}", **remedy("CANN is read as another", read=read))
    return ok(f"{found}{place}; kernels reads {read}", details=tuple(sentences(parse_release(found))))


def _absent(seen: Observations) -> Finding:
    if seen.disk.failure:
        return not_checked(f"its files could not be read: {seen.disk.failure}")
    if seen.expects_a_card:
        said = "not found: ASCEND_HOME_PATH is not set, and it is in none of its usual folders"
        return problem(said, **remedy("no CANN"))
    if seen.software:
        less = tuple(sentences(parse_release(SOFTWARE_CANN)))
        return ok(f"none, and none is needed: the software device stands for {SOFTWARE_CANN}", details=less)
    return not_checked("none found; the software device needs none")
