"""Make a release of the package, and try it: ``python scripts/release.py``, ``make release``."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from packaging.requirements import Requirement
from rich.console import Console

from releasing import ReleaseError, artifacts, trial

ROOT = Path(__file__).resolve().parent.parent
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    pythons: Annotated[str, typer.Option(help="Interpreters to try it with, with spaces.")] = "python3",
    output: Annotated[Path, typer.Option(help="Where the files go if everything holds.")] = ROOT / "dist",
) -> None:
    """Build the wheel and the source distribution of this commit, and try each where nothing else is installed.

    Each is built twice, and has the same bytes both times. Each is installed into an empty environment of every
    interpreter, by pip; what is tried there has no network. Ends with 0 if all holds, with 1 if not: then nothing is
    written.
    """
    console = Console(highlight=False, soft_wrap=True)
    try:
        commit = artifacts.require_clean(ROOT)
        version = artifacts.version(ROOT)
        example = trial.quick_start((ROOT / "README.md").read_text())
        with tempfile.TemporaryDirectory(prefix="kernels-ext-npu-release-") as folder:
            files = artifacts.build(ROOT, commit, Path(folder))
            console.print(f"{version}, from {commit[:12]}, the same bytes twice")
            failures = [
                step.failure
                for python in pythons.split()
                for file in files
                for step in _tried(python, file, Path(folder), version, example, console)
                if step.failure
            ]
            if failures:
                raise ReleaseError(f"{len(failures)} steps failed, nothing was written")
            output.mkdir(parents=True, exist_ok=True)
            for file in files:
                shutil.copy(file, output)
                console.print(f"{artifacts.digest(file)}  {output / file.name}")
    except ReleaseError as error:
        typer.echo(f"release: {error}", err=True)
        raise typer.Exit(1) from error
    console.print("What comes next is in docs/releasing.md.")


def _tried(python: str, file: Path, folder: Path, version: str, example: str, console: Console) -> list[trial.Step]:
    console.print(f"{file.name} with {python}")
    try:
        environment = trial.Environment(python, folder / f"{Path(python).name}-{file.suffix}")
        environment.install(file, _pins())
    except ReleaseError as error:
        steps = [trial.Step("install", str(error))]
    else:
        environment.disconnect()
        steps = [trial.Step("install"), *trial.steps(environment, version, example)]
    for step in steps:
        console.print(f"  {'failed' if step.failure else 'holds '}  {step.name}")
        if step.failure:
            console.print(step.failure, markup=False)
    return steps


def _pins() -> dict[str, str]:
    """Return the tested torch and torch_npu, as pip takes them."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    named = (Requirement(line) for line in lines if line and not line.startswith("#"))
    return {each.name: f"{each.name}{each.specifier}" for each in named if each.name in ("torch", "torch_npu")}


if __name__ == "__main__":
    app()
