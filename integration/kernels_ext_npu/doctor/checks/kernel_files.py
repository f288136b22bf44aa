"""The kernel repositories: intact, which variant is taken and why not the others, and what the cache holds."""

from __future__ import annotations

import platform
from dataclasses import replace
from typing import Any

from kernels_ext_npu.catalogue import REPOSITORIES, in_words
from kernels_ext_npu.distribution import sources
from kernels_ext_npu.doctor.findings import Finding, Verdict, not_checked, ok, problem, remedy
from kernels_ext_npu.doctor.observations import SOFTWARE_CANN, Observations
from kernels_ext_npu.doctor.probes import COPIES

STATES = ("complete", "incomplete", "damaged", "unreadable", "absent", "unknown")


def intact(seen: Observations) -> Finding:
    """Find whether the kernels' files are those that were published."""
    if seen.source == "hub":
        return not_checked("they come from the Hub: `kernels-ext-npu verify kernels-ext-npu/RMSNorm` checks them")
    try:
        sources.check(seen.source, REPOSITORIES)
    except FileNotFoundError as error:
        return problem(str(error), **remedy("no source"))
    outcome = seen.repositories
    if outcome is None or "copies" not in outcome.facts:
        return _failed(seen)
    copies, root = outcome.facts["copies"], outcome.facts["root"]
    problems = [line for copy in copies.values() for line in copy["problems"]]
    if problems:
        again = () if seen.source == "bundled" else (f"git -C '{seen.source}' checkout -- '*/build'",)
        said = f"{len(problems)} differ from what was published, in {root}"
        told = remedy("kernels changed", *again)
        return problem(said, details=_first(problems), **told, facts={"problems": problems})
    return ok(f"all {in_words()} repositories are intact, in {root}")


def variants(seen: Observations) -> list[Finding]:
    """Find which variant of each repository is taken; those that decide alike share a finding."""
    outcome = seen.repositories
    if outcome is None:
        return [_failed(seen)]
    copies = outcome.facts.get("copies") or {name: outcome.facts.get(f"cached {name}", {}) for name in REPOSITORIES}
    groups: dict[str, list[str]] = {}
    for name, copy in copies.items():
        if "decisions" in copy:
            groups.setdefault(str(copy["decisions"]), []).append(name)
    if not groups and seen.source == "hub":
        return [not_checked("nothing complete is in the cache; `kernels-ext-npu verify` asks the Hub")]
    if not groups and outcome.failure:
        return [_failed(seen)]
    machine = _machine(seen)
    return [_variant(names, copies[names[0]]["decisions"], machine) for names in groups.values()]


def cache(seen: Observations) -> Finding:
    """Find what the Hub's cache has of the kernels."""
    outcome = seen.repositories
    if outcome is None or ("cache" not in outcome.facts and "refused" not in outcome.facts):
        return _failed(seen)
    facts, severe = outcome.facts, seen.severe
    if "refused" in facts:
        return severe(facts["refused"], **remedy("cache in two places"))
    folder = facts["cache"]
    if facts["trouble"]:
        return severe(facts["trouble"], **remedy("cache without access"), facts={"folder": folder})
    cached = {name: facts.get(f"cached {name}", {"state": "unknown"}) for name in REPOSITORIES}
    states = {state: [name for name, entry in cached.items() if entry["state"] == state] for state in STATES}
    described = "; ".join(f"{state}: {', '.join(held)}" for state, held in states.items() if held)
    if len(states["absent"]) == len(cached):
        described = f"none of the {in_words()} kernels"
    elif len(states["complete"]) == len(cached):
        described = f"all {in_words()} kernels, complete"
    lines = [entry["reason"] for entry in cached.values() if "reason" in entry]
    lines += [line for entry in cached.values() for line in entry.get("problems", ())]
    more: dict[str, Any] = {"details": (folder, *_first(lines)), "facts": {"folder": folder, "repositories": cached}}
    if broken := states["damaged"] + states["unreadable"]:
        removed = (f"rm -r '{folder}/kernels--kernels-ext-npu--{name}'" for name in broken)
        return severe(described, **remedy("cache damaged", *removed), **more)
    if seen.source == "hub" and facts["offline"] and len(states["complete"]) < len(cached):
        said = f"{described}; and HF_HUB_OFFLINE=1 lets nothing be downloaded"
        return problem(said, **remedy("cache incomplete"), **more)
    offline = "; HF_HUB_OFFLINE=1" if facts["offline"] else ""
    needed = "" if seen.source == "hub" or states["complete"] else "; register() needs none"
    return ok(f"{described}{offline}{needed}", **more)


def _variant(repositories: list[str], decisions: list[dict[str, Any]], machine: str) -> Finding:
    who = f"all {in_words()} repositories" if len(repositories) == len(REPOSITORIES) else ", ".join(repositories)
    taken = next((decision["variant"] for decision in decisions if decision["rank"] == 1), None)
    others: dict[str, list[str]] = {}
    for decision in decisions:
        if decision["rank"] != 1:
            reason = decision["reason"] if decision["rank"] is None else "fits too, and comes later"
            others.setdefault(reason, []).append(decision["variant"])
    more: dict[str, Any] = {
        "details": (machine, *(f"{', '.join(names)}: {reason}" for reason, names in others.items())),
        "facts": {"repositories": repositories, "machine": machine, "decisions": decisions},
    }
    if taken is not None:
        return ok(f"{taken}, of {who}", **more)
    return problem(f"none fits, of {who}", **remedy("no variant"), **more)


def _machine(seen: Observations) -> str:
    """Describe the machine that `kernels` sees, or will see when the problems above are solved."""
    torch = seen.torch.facts.get("torch") or seen.packages["torch"].version
    if seen.cann:
        cann = f"CANN {seen.cann}{'' if seen.torch_npu_works else ', once torch_npu works'}"
    else:
        cann = f"CANN {SOFTWARE_CANN} (software device)" if seen.software else "without an NPU"
    return f"for torch {torch}, {cann}, {platform.machine()}"


def _failed(seen: Observations) -> Finding:
    outcome = seen.repositories
    if outcome is None or outcome.failure is None:
        return not_checked("the packages that read them do not work: see above")
    verdict = Verdict.PROBLEM if outcome.step == COPIES else Verdict.NOT_CHECKED
    return replace(outcome.problem(str(outcome.cause)), verdict=verdict)


def _first(lines: list[str]) -> tuple[str, ...]:
    return (*lines[:4], *[f"and {len(lines) - 4} more"] * (len(lines) > 4))
