"""``kernels-ext-npu benchmark``: what calls of real models cost, by their original, by our kernels and by others'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kernels_ext_npu import environment
from kernels_ext_npu.benchmarking import choices
from kernels_ext_npu.cli import pictures
from kernels_ext_npu.cli.refusals import RefusedError, refusing, take_device
from kernels_ext_npu.environment import UnsupportedEnvironmentError
from kernels_ext_npu.inspection.published_models import MODELS

if TYPE_CHECKING:
    from rich.console import Console

    from kernels_ext_npu.benchmarking.models import Model
    from kernels_ext_npu.benchmarking.providers import Provider
    from kernels_ext_npu.benchmarking.run import Result


@refusing()
def benchmark(
    model: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(MODELS)}, or what `inspect` takes; repeatable. By default all of these."),
    ] = None,
    kernel: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{', '.join(choices.KERNELS[:-2])}, layer for whole ones, or step for whole models; repeatable."
        ),
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="bf16 or fp16; repeatable. Both by default.")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=16, help="Of a prefill and of a training step: 4096, on the software device 64.")
    ] = None,
    shrink: Annotated[
        int | None, typer.Option(min=1, help="Divide widths, heads and experts: by 1, on the software device by 8.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=2, help="How many times each call is timed on a card.")] = choices.REPEATS,
    report: Annotated[
        Path | None,
        typer.Option(help="On a card: a JSON file with every figure, to attach to an issue. It names no one."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the results into this file, such as benchmark.png.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="A report on standard output, and nothing else there.")
    ] = False,
) -> None:
    """Measure kernels, decoder layers and steps of real models against transformers' and, where installed,
    LLaMA-Factory's.

    Prefill, decoding and training; forward, backward and both. What disagrees with the original has no figures. On a
    card: times between device events, launches, bytes and memory; on the software device all but times, and so no
    --report. Ends with 0, with 1 if one of our kernels disagreed or failed, with 2 if nothing could be measured.
    """
    with refusing(choices.CannotRunError, pictures.CannotDrawError, UnsupportedEnvironmentError, ImportError):
        models = choices.choose_models(model or [], MODELS)
        kernels = choices.choose("--kernel", kernel or [], choices.KERNELS)
        dtypes = choices.choose_dtypes(dtype or [])
        if plot is not None:
            pictures.check(plot)
        if report is not None and not report.absolute().parent.is_dir():
            raise RefusedError(f"--report {report}: there is no folder {report.absolute().parent}")
        take_device(needed=True)
        environment.check()
        choices.check_device(dtypes)
        import softnpu
        from kernels_ext_npu.benchmarking.models import load
        from kernels_ext_npu.benchmarking.timing import NO_TIMES

        software = softnpu.is_software()
        if software and report is not None:
            raise RefusedError(f"--report: {NO_TIMES}")
        tokens, shrink = tokens or (64 if software else 4096), shrink or (8 if software else 1)
        asked = choices.Asked(dtypes, kernels, tokens, shrink, repeats)
        wrong = _run([load(name, shrink) for name in models], asked, report, plot, as_json)
    raise typer.Exit(1 if wrong else 0)


def _run(models: list[Model], asked: choices.Asked, report_path: Path | None, plot: Path | None, as_json: bool) -> bool:
    """Measure, show, and tell whether one of our kernels was wrong."""
    from rich.console import Console

    import softnpu
    from kernels_ext_npu.benchmarking import agreement, providers, report, run, showing, timing

    console = Console(stderr=as_json)
    if not console.is_terminal:  # then nothing says how wide it is
        console.width = max(console.width, 140)
    found, llama_factory = providers.providers()
    note = timing.NO_TIMES if softnpu.is_software() else timing.method(asked.repeats)
    sizes: dict[str, Any] = {"tokens": asked.tokens, "shrink": asked.shrink}
    said: dict[str, Any] = run.environment(llama_factory) | {"note": note, "tolerance": agreement.RULE} | sizes
    said["models"] = {model.name: {"source": model.source, "sizes": model.sizes()} for model in models}
    console.print(_heading(said), highlight=False, markup=False, soft_wrap=True)
    sizes["models"] = [{"name": model.name} | model.sizes() for model in models]
    names = [provider.name for provider in found]
    results: list[Result] = []
    for model in models:
        for dtype in asked.dtypes:
            measured = _measure(console, model, dtype, asked, found)
            if measured:
                showing.show(console, measured, names)
            else:
                console.print(f"{model.name} has nothing of {', '.join(asked.kernels)}", highlight=False)
            results += measured
            if report_path is not None:  # each time: what comes next may end the process
                head = report.head(llama_factory, note, agreement.RULE, sizes)
                report_path.write_text(report.to_text(head, results))
    if not any(result.figures for result in results):
        nothing = f"none of the models has a call of {', '.join(asked.kernels)}"
        raise choices.CannotRunError(next((str(result.refused) for result in results), nothing))
    if plot is not None:
        title = f"{said['device']}, {asked.dtypes[0]}, {asked.tokens} tokens{_shrunk(asked.shrink)}"
        showing.plot(plot, results, names, title)
        console.print(f"drawn into {plot}", highlight=False, soft_wrap=True)
    if report_path is not None:
        console.print(f"Wrote {report_path}: it can be attached to an issue as it is.", highlight=False, soft_wrap=True)
    if as_json:
        typer.echo(json.dumps(said | {"results": [result.to_dict() for result in results]}, indent=2))
    return any(result.wrong and result.provider == providers.OURS for result in results)


def _measure(console: Console, model: Model, dtype: str, asked: choices.Asked, found: list[Provider]) -> list[Result]:
    from kernels_ext_npu.benchmarking import run

    results: list[Result] = []
    with console.status(f"{model.name}, {dtype}") as status:
        for result in run.run(model, dtype, asked, found):
            results.append(result)
            status.update(f"{model.name}, {dtype}, {result.phase}, {result.provider}: {result.name}")
    return results


def _heading(said: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in said["versions"].items())
    return f"{said['device']}{_shrunk(said['shrink'])}\n{versions}\n{said['note']}\n{said['tolerance']}\n"


def _shrunk(by: int) -> str:
    return f", widths, heads and experts divided by {by}" if by > 1 else ""
