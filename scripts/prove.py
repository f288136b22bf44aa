"""Run the strict variants on the releases that they name: ``python scripts/prove.py``, ``make test-variants``."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Annotated

import typer
from rich.console import Console

from proving import ProvingError, interpreters, report
from proving.packages import Packages
from proving.pairs import Proof, proofs
from proving.run import Outcome, prove
from strict import strict_variants

ROOT = Path(__file__).resolve().parent.parent
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def default_cache() -> Path:
    """Return the folder of the interpreters and wheels: ``$XDG_CACHE_HOME/kernels-ext-npu/variants``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kernels-ext-npu" / "variants"


@app.command()
def main(
    tests: Annotated[list[str] | None, typer.Argument(help="Of pytest, in place of tests/variants.")] = None,
    pairs: Annotated[str, typer.Option(help="TORCH=TORCH_NPU or TORCH, several with spaces.")] = "",
    jobs: Annotated[int, typer.Option(min=1, help="Processes at once, each of about 1.5 GB.")] = os.cpu_count() or 1,
    record: Annotated[
        bool, typer.Option("--record", help="Keep what was found of those that run without --pairs.")
    ] = False,
) -> None:
    """Run tests/variants for every strict variant, on the torch and torch_npu that it names, and for newer releases.

    Where this machine is not aarch64, they run under qemu. Interpreters and wheels stay in a cache, about 8 GB for all
    releases. Ends with 0 if all hold, with 1 if not, with 2 if something is missing that the proofs need.
    """
    console = Console()
    try:
        if record and tests:
            raise ProvingError("--record keeps what tests/variants found as a whole: leave out either it or the tests")
        wanted = proofs(strict_variants(ROOT), pairs)
        interpreter = interpreters.find(default_cache())
        packages = Packages(default_cache(), interpreter.version)
        begun = f"{len(wanted)} to prove with Python {interpreter.version} for aarch64, in {default_cache()}"
        console.print(begun, highlight=False, soft_wrap=True)
        folders = {proof: _folders(proof, packages, console) for proof in wanted}
    except (ProvingError, ValueError) as error:
        typer.echo(f"prove: {error}", err=True)
        raise typer.Exit(2) from error

    lock = Lock()

    def run(proof: Proof) -> Outcome:
        outcome = prove(proof, interpreter, folders[proof], ROOT, *(tests or ()))
        with lock:  # each as it ends: a run of all takes an hour
            report.announce(outcome, console, default_cache() / "logs")
            if record:
                report.write([outcome], ROOT)
        return outcome

    with ThreadPoolExecutor(jobs) as pool:
        outcomes = list(pool.map(run, wanted))
    if not tests:  # only those of tests/variants say how far results were from the truth
        console.print(report.table(outcomes))
    raise typer.Exit(int(any(outcome.failures for outcome in outcomes)))


def _folders(proof: Proof, packages: Packages, console: Console) -> list[Path]:
    with console.status(f"wheels of torch {proof.torch} and torch_npu {proof.torch_npu}"):
        wheels = [packages.release("torch_npu", proof.torch_npu), packages.release("torch", proof.torch)]
        return [*wheels, packages.tools(ROOT / "requirements.txt")]


if __name__ == "__main__":
    app()
