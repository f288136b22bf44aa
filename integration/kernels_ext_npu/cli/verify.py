"""``kernels-ext-npu verify``: is a kernel what was published, and which variant of it is taken where."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kernels_ext_npu.cli.terminal import AsJson, console, print_json, say, take_device
from kernels_ext_npu.environment import RefusedError

if TYPE_CHECKING:
    from rich.console import Console

    from kernels_ext_npu.distribution.variant_choice import Machine
    from kernels_ext_npu.distribution.verification import Verified


def verify(
    target: Annotated[str, typer.Argument(help="A repository id such as kernels-ext-npu/RMSNorm, or a path.")] = ".",
    version: Annotated[int, typer.Option(help="Of a repository on the Hub: the branch v<N>.")] = 1,
    torch: Annotated[
        str | None, typer.Option(help="Which variant a machine with this torch takes, such as 2.8.")
    ] = None,
    cann: Annotated[str | None, typer.Option(help="Its CANN, such as 8.2; it has no NPU without one.")] = None,
    arch: Annotated[str | None, typer.Option(help="Its processor, such as aarch64.")] = None,
    as_json: AsJson = False,
) -> None:
    """Recompute every digest of a kernel and name what was changed, is missing or is extra.

    A path is a clone, a kernel repository, a build folder, a variant, or a cache. With HF_HUB_OFFLINE=1 a repository id
    is looked up in the cache. Ends with 0 if all is intact, with 1 if not, with 2 if it could not be found out.
    """
    take_device(needed=False)  # without torch_npu kernels sees a machine without an NPU
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars

    from kernels_ext_npu.distribution import published, variant_choice

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        machine = variant_choice.describe(torch, cann, arch)
        report = [_report(name, commit, found, machine) for name, commit, found in _found(target, version)]
        if not Path(target).expanduser().is_dir() and not constants.HF_HUB_OFFLINE:
            report[0]["refusal"] = published.refusal(target, version)
    except (ValueError, LookupError, *published.FAILURES) as error:
        raise RefusedError(str(error)) from error
    shown = console(stderr=as_json)
    for entry in report:
        _show(shown, entry)
    if as_json:
        print_json(report)
    raise typer.Exit(0 if all(entry["intact"] for entry in report) else 1)


def _found(target: str, version: int) -> list[tuple[str, str | None, list[Verified]]]:
    """Find the name, commit and variants of each repository that the target means."""
    from huggingface_hub import constants

    from kernels_ext_npu.distribution import targets

    path = Path(target).expanduser()
    if path.is_dir():
        return [(name, None, found) for name, found in targets.verify_at(path).items()]
    if target.count("/") != 1 or target.startswith((".", "/", "~")):
        raise RefusedError(f"{target} is neither a folder nor a repository id such as organisation/name")
    verify_it = targets.verify_cached if constants.HF_HUB_OFFLINE else targets.verify_published
    return [(target, *verify_it(target, version))]


def _report(name: str, commit: str | None, found: list[Verified], machine: Machine | None) -> dict[str, Any]:
    from kernels_ext_npu.distribution import variant_choice

    decisions = {variant_choice.this_machine(): variant_choice.decide_among(found)}
    if machine is not None:
        decisions[str(machine)] = variant_choice.decide_among(found, machine)
    return {
        "name": name,
        "commit": commit,
        "intact": not any(entry.problems for entry in found),
        "variants": {
            entry.variant: {"files": entry.files, "signature": entry.signature, "problems": entry.problems}
            for entry in found
        },
        "machines": {described: [asdict(decision) for decision in made] for described, made in decisions.items()},
    }


def _show(shown: Console, report: dict[str, Any]) -> None:
    from rich import box
    from rich.table import Table

    title = report["name"] + (f" at {report['commit']}" if report["commit"] else "")
    table = Table("variant", "files", "content", "signature", title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for variant, entry in report["variants"].items():
        verdict = f"[red]{len(entry['problems'])} problems" if entry["problems"] else "[green]intact"
        table.add_row(variant, str(entry["files"]), verdict, "" if variant.startswith("(") else entry["signature"])
    shown.print(table)
    for variant, entry in report["variants"].items():
        for problem in entry["problems"]:
            say(shown, problem if variant.startswith("(") else f"{variant}/{problem}", "red")
    for described, decisions in report["machines"].items():
        taken = next((decision["variant"] for decision in decisions if decision["rank"] == 1), "no variant fits")
        say(shown, f"On a machine with {described}: {taken}")
        for decision in decisions:
            if decision["rank"] != 1:
                say(shown, f"  {decision['variant']}: {decision['reason']}")
    if report.get("refusal"):
        say(shown, report["refusal"])
