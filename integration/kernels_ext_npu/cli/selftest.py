"""``kernels-ext-npu selftest``: every kernel on the NPU of this machine, against float64 on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kernels_ext_npu.cli.terminal import AsJson, check_file, console, progress, write_file


def selftest(
    quick: Annotated[bool, typer.Option("--quick", help="Each function once, and two models: half a minute.")] = False,
    output: Annotated[
        Path | None, typer.Option(help="A JSON file with every figure, to attach to an issue. It names no one.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help='Tests with this in their name, such as "RMSNorm" or "float32"; repeatable.'),
    ] = None,
    source: Annotated[
        str, typer.Option(help="Where the kernels come from, as register() takes it: bundled, hub, or a clone.")
    ] = "bundled",
    limit: Annotated[
        float | None, typer.Option(min=1.0, help="Seconds after which a test counts as hanging; 60 by default.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compute with every kernel on the NPU of this machine, and compare.

    Each function and layer of each repository, forward and backward, in float32, float16 and bfloat16, with sizes at
    and around the limits of its operators, against formulas in float64 on the host; tiny models with kernels against
    their originals. What crashes or hangs does so in a process of its own, and the rest goes on behind it.

    Runs on the software device where there is no NPU, and says so. Ends with 0 if everything agrees, with 1 if anything
    does not, and with 2 if nothing could be tested.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

    from kernels_ext_npu.selftest import result_report, runner

    check_file("--output", output)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with progress(*columns) as bar:
        task = bar.add_task("starting", total=None)

        def tell(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what.replace(" | ", ", "))

        outcome = runner.run(source, quick, only or (), limit or runner.LIMIT, tell)
    shown = console(stderr=as_json)
    result_report.show(shown, outcome)
    if output is not None:
        write_file("--output", output, result_report.to_text(outcome))
        shown.print(f"Wrote {output}: it can be attached to an issue as it is.", highlight=False)
    if as_json:
        typer.echo(result_report.to_text(outcome), nl=False)
    raise typer.Exit(0 if outcome.agrees else 1)
