"""Run it all: preflight, plan, apply, and the checks afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from huggingface_hub import HfApi
from huggingface_hub.utils import disable_progress_bars
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

from publishing import afterwards, local, plan, preflight, report
from publishing.apply import apply
from publishing.local import Local, NoRepositoryError
from publishing.plan import Wanted
from publishing.remote import Patience, RefusedError, Remote, RemoteError
from publishing.report import Report


@dataclass(frozen=True)
class Request:
    """Hold what the command line asks for.

    Attributes:
        load: load and run the kernel, before and after. Only tests of everything else leave it out.
    """

    repository: str
    variants: tuple[str, ...] = ()
    repo_id: str | None = None
    version: int | None = None
    dry_run: bool = False
    create_pr: bool = False
    pruned: tuple[str, ...] = ()
    load: bool = True
    patience: Patience = field(default_factory=Patience)


def publish(request: Request, console: Console, api: HfApi | None = None) -> Report:
    """Publish a kernel repository. Nothing is raised: the report says how it ended, and why."""
    result = Report(request.repository, request.repo_id, request.version)
    disable_progress_bars()  # there is one here
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        steps = Steps(progress, progress.add_task("reading", total=4 if request.dry_run else 7))
        try:
            _publish(request, result, console, api or HfApi(), steps)
        except (RefusedError, NoRepositoryError) as error:
            result.ended("refused", *map(str, error.args))
        except RemoteError as error:
            result.ended("failed", str(error))
    report.show_end(console, result)
    return result


@dataclass(frozen=True)
class Steps:
    progress: Progress
    task: TaskID

    def next(self, description: str) -> None:
        self.progress.update(self.task, description=description, advance=1)


def _publish(request: Request, result: Report, console: Console, api: HfApi, steps: Steps) -> None:
    found = local.find(request.repository, request.variants, request.pruned)
    version = request.version if request.version is not None else found.general.get("version")
    repo_id = request.repo_id or found.repo_id
    result.repo_id, result.version = repo_id, version

    steps.next("checking what is to be published")
    reasons = preflight.violations(found, version if version is not None else -1, request.pruned, request.load)
    if repo_id is None:
        reasons.append("no repository: give --repo-id, or repo-id in [general.hub] of build.toml")
    if not request.dry_run:
        reasons += preflight.token_violation()
    if reasons or repo_id is None:
        raise RefusedError(*reasons)
    remote = Remote(api, repo_id, request.patience)
    wanted = _wanted(found, f"v{version}", request.pruned)

    steps.next("comparing with the Hub")
    plans = [remote.persist(repo_id, partial(plan.make, remote, branch)) for branch in wanted]
    for made in plans:
        result.planned(made)
    report.show_plan(console, repo_id, plans)
    if request.dry_run:
        result.ended("planned")
        return

    message = f"Publish {', '.join(found.variants) or 'without ' + ', '.join(request.pruned)}"
    applied = []
    for branch, text in zip(wanted, (message, "Publish the card")):
        steps.next(f"publishing {branch.branch}")
        applied.append(apply(remote, branch, text, request.create_pr))
        result.applied(applied[-1])
    for done in applied:
        steps.next(f"reading {done.first.branch} again")
        result.branches[done.first.branch]["checked"] = afterwards.check_branch(remote, done)
    if request.load:
        steps.next("loading it in a fresh process")
        result.loaded = afterwards.check_loading(remote, int(str(version)), applied[0])
    changed = any(done.committed for done in applied)
    result.ended("published" if changed else "nothing to do")


def _wanted(found: Local, branch: str, pruned: tuple[str, ...]) -> list[Wanted]:
    owned = tuple(f"build/{variant}/" for variant in found.variants)
    gone = tuple(f"build/{variant}/" for variant in pruned)
    return [Wanted(branch, found.files(), owned, gone), Wanted("main", found.card())]
