"""Publish a kernel repository to the Hub: ``python scripts/publish.py RMSNorm [--dry-run]``."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from huggingface_hub.utils import disable_progress_bars
from rich.console import Console

from publishing.run import Request, publish

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    repository: Annotated[str, typer.Argument(help="RMSNorm, or a path to a kernel repository.")],
    variant: Annotated[list[str] | None, typer.Option(help="Publish this variant alone; repeatable.")] = None,
    repo_id: Annotated[str | None, typer.Option(help="ORG/NAME; by default the one in build.toml.")] = None,
    version: Annotated[int | None, typer.Option(help="Publish to v<N>; by default the one in build.toml.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change, and write nothing.")] = False,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request for each branch.")] = False,
    prune: Annotated[list[str] | None, typer.Option(help="Remove this variant from the Hub; repeatable.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A report on standard output, alone there.")] = False,
) -> None:
    """Check a kernel repository, show what would change on the Hub, publish it, and check what is there.

    The build goes to the branch v<N>, the card to main, each in one commit. Variants that are not published stay as
    they are. The token comes from HF_TOKEN or from `hf auth login`. Ends with 0 if it is done or nothing was to do,
    with 1 if it was refused, with 2 if the Hub changed or failed.
    """
    disable_progress_bars()
    request = Request(repository, tuple(variant or ()), repo_id, version, dry_run, create_pr, tuple(prune or ()))
    report = publish(request, Console(stderr=as_json))
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
    raise typer.Exit(report.exit_code)


if __name__ == "__main__":
    app()
