"""``kernels-ext-npu verify``: is a kernel what was published, and which variant of it is taken where."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kernels_ext_npu.cli.refusals import refusing, take_device

if TYPE_CHECKING:
    from rich.console import Console

    from kernels_ext_npu.distribution.machines import Machine
    from kernels_ext_npu.distribution.verification import Verified


@refusing()
def verify(
    target: Annotated[str, typer.Argument(help="A repository id such as kernels-ext-npu/RMSNorm, or a path.")] = ".",
    version: Annotated[int, typer.Option(help="Of a repository on the Hub: the branch v<N>.")] = 1,
    torch: Annotated[
        str | None, typer.Option(help="Which variant a machine with this torch takes, such as 2.8.")
    ] = None,
    cann: Annotated[str | None, typer.Option(help="Its CANN, such as 8.2; it has no NPU without one.")] = None,
    arch: Annotated[str | None, typer.Option(help="Its processor, such as aarch64.")] = None,
    signed_by: Annotated[list[str] | None, typer.Option(help="URI of a workflow that may sign; repeatable.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="A report on standard output, and nothing else there.")
    ] = False,
) -> None:
    """Recompute every digest of a kernel and name what was changed, is missing or is extra.

    A path is a clone, a kernel repository, a build folder, a variant, or a cache. With HF_HUB_OFFLINE=1 a repository id
    is looked up in the cache. Ends with 0 if all is intact, with 1 if not, with 2 if it could not be found out.
    """
    take_device(needed=False)  # without torch_npu kernels sees a machine without an NPU
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
    from huggingface_hub.utils import disable_progress_bars
    from rich.console import Console

    from kernels_ext_npu.distribution import machines, published

    if not sys.stderr.isatty():
        disable_progress_bars()

    console = Console(stderr=as_json)
    with refusing(ValueError, LookupError, HfHubHTTPError, OfflineModeIsEnabled, OSError):
        machine = machines.describe(torch, cann, arch)
        with _found(target, version, signed_by) as repositories:
            report = [_report(name, commit, found, machine) for name, commit, found in repositories]
            if not Path(target).expanduser().is_dir() and not constants.HF_HUB_OFFLINE:
                report[0]["refusal"] = published.refusal(target, version)
            for (_, _, found), entry in zip(repositories, report):
                _show(console, entry, found)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    raise typer.Exit(0 if all(entry["intact"] for entry in report) else 1)


Found = tuple[str, str | None, "list[Verified]"]


@contextmanager
def _found(target: str, version: int, signers: list[str] | None) -> Iterator[list[Found]]:
    """Find the name, commit and variants of each repository that the target means."""
    from huggingface_hub import constants

    from kernels_ext_npu.distribution import targets

    path = Path(target).expanduser()
    if path.is_dir():
        yield [(found.name, None, found.verify(signers)) for found in targets.find(path)]
    elif target.count("/") != 1 or target.startswith((".", "/", "~")):
        raise targets.NothingToVerifyError(
            f"{target} is neither a folder nor a repository id such as organisation/name"
        )
    elif constants.HF_HUB_OFFLINE:
        yield [_cached(target, version, signers)]
    else:
        with tempfile.TemporaryDirectory(prefix="kernels-ext-npu-") as folder:
            yield [_published(target, version, signers, Path(folder))]


def _published(repo_id: str, version: int, signers: list[str] | None, folder: Path) -> Found:
    from huggingface_hub import HfApi

    from kernels_ext_npu.distribution import published
    from kernels_ext_npu.distribution.verification import Verified, verify_build

    api = HfApi()
    commit = published.head(api, repo_id, version)
    files = published.tree(api, repo_id, commit)
    snapshot = published.download(api, repo_id, commit, folder)
    if not (snapshot / "build").is_dir():
        raise LookupError(f"{repo_id} has no variants on v{version}")
    found = verify_build(snapshot / "build", signers=signers)
    wrong_version = [entry for entry in found if entry.version not in (None, version)]
    for entry in wrong_version:
        entry.problems.append(f"metadata.json: says version {entry.version} on the branch v{version}")
    found.append(Verified("(download)", snapshot, len(files), problems=published.differences(snapshot, files)))
    return repo_id, commit, found


def _cached(repo_id: str, version: int, signers: list[str] | None) -> Found:
    from huggingface_hub import constants
    from kernels._versions import resolve_version_spec_as_ref
    from kernels.hf_hub import CACHE_DIR

    from kernels_ext_npu.distribution import targets

    commit = resolve_version_spec_as_ref(repo_id, version, local_files_only=True).target_commit
    cache = Path(CACHE_DIR or constants.HF_HUB_CACHE)
    (target,) = targets.find(cache / f"kernels--{repo_id.replace('/', '--')}" / "snapshots" / commit)
    return repo_id, commit, target.verify(signers)


def _report(name: str, commit: str | None, found: list[Verified], machine: Machine | None) -> dict[str, Any]:
    from kernels_ext_npu.distribution import machines

    variants = [entry.variant for entry in found if (entry.path / "metadata.json").exists()]
    decisions = {machines.this_machine(): machines.decide(variants)}
    if machine is not None:
        decisions[str(machine)] = machines.decide(variants, machine)
    return {
        "name": name,
        "commit": commit,
        "intact": all(entry.intact for entry in found),
        "variants": {
            entry.variant: {"files": entry.files, "signature": entry.signature, "problems": entry.problems}
            for entry in found
        },
        "machines": {described: [asdict(decision) for decision in made] for described, made in decisions.items()},
    }


def _show(console: Console, report: dict[str, Any], found: list[Verified]) -> None:
    from rich.table import Table

    table = Table("variant", "files", "content", "signature", title=_title(report), title_justify="left")
    for entry in found:
        verdict = "[green]intact" if entry.intact else f"[red]{len(entry.problems)} problems"
        signature = "" if entry.variant.startswith("(") else entry.signature
        table.add_row(entry.variant, str(entry.files), verdict, signature)
    console.print(table)
    for entry in found:
        for problem in entry.problems:
            line = problem if entry.variant.startswith("(") else f"{entry.variant}/{problem}"
            console.print(line, style="red", highlight=False, markup=False, soft_wrap=True)
    for described, decisions in report["machines"].items():
        _show_decisions(console, described, decisions)
    if report.get("refusal"):
        console.print(report["refusal"], highlight=False, markup=False, soft_wrap=True)


def _show_decisions(console: Console, described: str, decisions: list[dict[str, Any]]) -> None:
    taken = next((decision["variant"] for decision in decisions if decision["rank"] == 1), None)
    console.print(f"On a machine with {described}: {taken or 'no variant fits'}", highlight=False, soft_wrap=True)
    for decision in decisions:
        if decision["rank"] != 1:
            console.print(
                f"  {decision['variant']}: {decision['reason']}", highlight=False, markup=False, soft_wrap=True
            )


def _title(report: dict[str, Any]) -> str:
    return report["name"] + (f" at {report['commit']}" if report["commit"] else "")
