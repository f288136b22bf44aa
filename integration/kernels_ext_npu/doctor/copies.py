"""The kernel repositories: intact, which variant is taken and why not the others, and what the cache holds."""

from __future__ import annotations

import platform
from typing import Any

from kernels_ext_npu.catalogue import REPOSITORIES, in_words
from kernels_ext_npu.doctor.findings import Finding, not_checked, ok, problem, warning
from kernels_ext_npu.doctor.known_errors import explain
from kernels_ext_npu.doctor.observations import SOFTWARE_CANN, Observations
from kernels_ext_npu.doctor.repositories_probe import COPIES

OFFLINE = "is not available in the local cache and Hugging Face Hub is in offline mode"
CHANGED = "changed, its digest differs"
TILDE = "KERNELS_CACHE is …: kernels would look for a version in one folder, for its files in another"
NO_VARIANT = "Cannot find a build variant for this system"


def intact(seen: Observations) -> Finding:
    """Find whether the kernels' files are those that were published."""
    name = "kernel files"
    if seen.source == "hub":
        return not_checked(name, "they come from the Hub: `kernels-ext-npu verify kernels-ext-npu/RMSNorm` checks them")
    outcome = seen.repositories
    if outcome is None or "copies" not in outcome.facts:
        return _failed(name, seen)
    copies = outcome.facts["copies"]
    missing = [copy["missing"] for copy in copies.values() if "missing" in copy]
    if missing:
        return problem(
            name,
            f"{', '.join(missing)} does not exist",
            advice='A source is "bundled", "hub", or the path of a clone of kernels-ext-npu.',
            see='A source is "bundled", "hub", or the path of a clone of kernels-ext-npu',
        )
    problems = [line for copy in copies.values() for line in copy["problems"]]
    if problems:
        return problem(
            name,
            f"{len(problems)} differ from what was published, in {outcome.facts['root']}",
            details=_first(problems),
            advice="Somebody or something has changed them. Install the package again, or check the clone out again.",
            commands=(_again(seen),),
            see=CHANGED,
            facts={"problems": problems},
        )
    return ok(name, f"all {in_words()} repositories are intact, in {outcome.facts['root']}")


def variants(seen: Observations) -> list[Finding]:
    """Find which variant of each repository is taken; those that decide alike share a finding."""
    outcome, name = seen.repositories, "variant"
    if outcome is None:
        return [_failed(name, seen)]
    copies = outcome.facts.get("copies") or {
        repository: outcome.facts.get(f"cached {repository}", {}) for repository in REPOSITORIES
    }
    groups: dict[str, tuple[list[str], list[dict[str, Any]]]] = {}
    for repository, copy in copies.items():
        if "decisions" in copy:
            groups.setdefault(str(copy["decisions"]), ([], copy["decisions"]))[0].append(repository)
    if not groups:
        if seen.source == "hub":
            return [not_checked(name, "nothing complete is in the cache; `kernels-ext-npu verify` asks the Hub")]
        return [_failed(name, seen)] if outcome.failure else []
    machine = _machine(seen)
    return [_variant(repositories, decisions, machine, seen) for repositories, decisions in groups.values()]


def cache(seen: Observations) -> Finding:
    """Find what the Hub's cache has of the kernels."""
    name, outcome = "Hub cache", seen.repositories
    if outcome is None or ("cache" not in outcome.facts and "refused" not in outcome.facts):
        return _failed(name, seen)
    facts = outcome.facts
    severe = problem if seen.source == "hub" else warning
    if "refused" in facts:
        return severe(
            name,
            facts["refused"],
            advice="Set it to the whole path of a folder, or unset it: then HF_HOME and HF_HUB_CACHE say where.",
            commands=("unset KERNELS_CACHE",),
            see=TILDE,
        )
    if facts["trouble"]:
        return severe(
            name,
            facts["trouble"],
            advice="Models and kernels are kept there. Let HF_HOME name a folder that you may read and write.",
            commands=('export HF_HOME="$HOME/huggingface"',),
            facts={"folder": facts["cache"]},
        )
    cached = {repository: facts.get(f"cached {repository}", {"state": "unknown"}) for repository in REPOSITORIES}
    states = {state: [each for each, entry in cached.items() if entry["state"] == state] for state in _STATES}
    described = "; ".join(f"{state}: {', '.join(held)}" for state, held in states.items() if held)
    if len(states["absent"]) == len(cached):
        described = f"none of the {in_words()} kernels"
    elif len(states["complete"]) == len(cached):
        described = f"all {in_words()} kernels, complete"
    offline = "; HF_HUB_OFFLINE=1" if facts["offline"] else ""
    lines = [entry["reason"] for entry in cached.values() if "reason" in entry]
    lines += [line for entry in cached.values() for line in entry.get("problems", ())]
    made = {"details": (facts["cache"], *_first(lines)), "facts": {"folder": facts["cache"], "repositories": cached}}
    if states["damaged"] or states["unreadable"]:
        return severe(
            name,
            described,
            advice="kernels would load them as they are. Remove these folders, and download or install them again.",
            commands=tuple(
                f"rm -r '{facts['cache']}/kernels--kernels-ext-npu--{each}'"
                for each in states["damaged"] + states["unreadable"]
            ),
            see=CHANGED,
            **made,
        )
    if seen.source == "hub" and facts["offline"] and len(states["complete"]) < len(cached):
        return problem(
            name,
            f"{described}; and HF_HUB_OFFLINE=1 lets nothing be downloaded",
            advice="Make a bundle where there is internet, and install it here. What kernels downloads by itself is "
            "not enough. Or use the copies in the package: register() without source.",
            commands=("kernels-ext-npu bundle --output kernels.zip --source hub", INSTALL),
            see=OFFLINE,
            **made,
        )
    needed = "" if seen.source == "hub" or states["complete"] else "; register() needs none"
    return ok(name, f"{described}{offline}{needed}", **made)


INSTALL = "kernels-ext-npu bundle --install kernels.zip"
_STATES = ("complete", "incomplete", "damaged", "unreadable", "absent", "unknown")


def _variant(repositories: list[str], decisions: list[dict[str, Any]], machine: str, seen: Observations) -> Finding:
    who = f"all {in_words()} repositories" if len(repositories) == len(REPOSITORIES) else ", ".join(repositories)
    taken = next((decision["variant"] for decision in decisions if decision["rank"] == 1), None)
    details = [machine, *_grouped(decisions)]
    facts = {"repositories": repositories, "machine": machine, "decisions": decisions}
    if taken is None:
        return problem(
            "variant",
            f"none fits, of {who}",
            details=tuple(details),
            advice="kernels would end in FileNotFoundError. The package has variants for every machine: use register() "
            "without source, or install it again.",
            see=NO_VARIANT,
            facts=facts,
        )
    return ok("variant", f"{taken}, of {who}", details=tuple(details), facts=facts)


def _grouped(decisions: list[dict[str, Any]]) -> list[str]:
    """List the other variants, with those together that are rejected for the same reason."""
    reasons: dict[str, list[str]] = {}
    for decision in decisions:
        if decision["rank"] != 1:
            reason = decision["reason"] if decision["rank"] is None else "fits too, and comes later"
            reasons.setdefault(reason, []).append(decision["variant"])
    return [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]


def _machine(seen: Observations) -> str:
    """Describe the machine that `kernels` sees, or will see when the problems above are solved."""
    torch = seen.torch.facts.get("torch") or seen.packages["torch"].version
    if seen.cann:
        cann = f"CANN {seen.cann}{'' if seen.torch_npu_works else ', once torch_npu works'}"
    else:
        cann = f"CANN {SOFTWARE_CANN} (software device)" if seen.software else "without an NPU"
    return f"for torch {torch}, {cann}, {platform.machine()}"


def _failed(name: str, seen: Observations) -> Finding:
    outcome = seen.repositories
    if outcome is None or outcome.failure is None:
        return not_checked(name, "the packages that read them do not work: see above")
    known = explain(outcome.errors)
    ours = outcome.step == COPIES
    return (problem if ours else not_checked)(
        name,
        str(outcome.cause),
        advice=known.advice if known else None,
        commands=known.commands if known else (),
        see=known.see if known else None,
        facts={"failure": outcome.failure, "errors": outcome.errors, "output": outcome.output},
    )


def _again(seen: Observations) -> str:
    if seen.source != "bundled":
        return f"git -C '{seen.source}' checkout -- '*/build'"
    return "pip install --force-reinstall --no-deps kernels-ext-npu  # or the path of the clone"


def _first(lines: list[str], count: int = 4) -> tuple[str, ...]:
    more = (f"and {len(lines) - count} more",) if len(lines) > count else ()
    return (*lines[:count], *more)
