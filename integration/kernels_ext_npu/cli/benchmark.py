"""``kernels-ext-npu benchmark``: what calls of real models cost, by their original, by our kernels and by others'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kernels_ext_npu import environment
from kernels_ext_npu.benchmarking import choices
from kernels_ext_npu.cli import pictures
from kernels_ext_npu.cli.refusals import refusing, take_device
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
        typer.Option(help=f"{', '.join(choices.KERNELS[:-1])}, or {choices.KERNELS[-1]} for whole ones; repeatable."),
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="bf16 or fp16; repeatable. Both by default.")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=16, help="Of a prefill and of a training step: 4096, on the software device 64.")
    ] = None,
    shrink: Annotated[
        int | None, typer.Option(min=1, help="Divide widths, heads and experts: by 1, on the software device by 8.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the results into this file, such as benchmark.png.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="A report on standard output, and nothing else there.")
    ] = False,
) -> None:
    """Measure kernels and decoder layers of real models against transformers and, where installed, LLaMA-Factory.

    Prefill, decoding and training; forward, backward and both. What disagrees with the original has no figures. On a
    card: times between device events, launches, bytes and memory; on the software device all but times. Ends with 0,
    with 1 if one of our kernels disagreed or failed, with 2 if nothing could be measured.
    """
    with refusing(choices.CannotRunError, pictures.CannotDrawError, UnsupportedEnvironmentError, ImportError):
        models = choices.choose_models(model or [], MODELS)
        kernels = choices.choose("--kernel", kernel or [], choices.KERNELS)
        dtypes = choices.choose_dtypes(dtype or [])
        if plot is not None:
            pictures.check(plot)
        take_device(needed=True)
        environment.check()
        choices.check_device(dtypes)
        import softnpu
        from kernels_ext_npu.benchmarking.models import load

        software = softnpu.is_software()
        tokens, shrink = tokens or (64 if software else 4096), shrink or (8 if software else 1)
        loaded = [load(name, shrink) for name in models]
        wrong = _run(loaded, dtypes, kernels, tokens, shrink, plot, as_json)
    raise typer.Exit(1 if wrong else 0)


def _run(
    models: list[Model],
    dtypes: list[str],
    kernels: list[str],
    tokens: int,
    shrink: int,
    plot: Path | None,
    as_json: bool,
) -> bool:
    """Measure, show, and tell whether one of our kernels was wrong."""
    from rich.console import Console

    import softnpu
    from kernels_ext_npu.benchmarking import agreement, measuring, providers, run, showing

    console = Console(stderr=as_json)
    if not console.is_terminal:  # then nothing says how wide it is
        console.width = max(console.width, 140)
    found, llama_factory = providers.providers()
    report: dict[str, Any] = run.environment(llama_factory)
    note = measuring.NO_TIMES if softnpu.is_software() else measuring.METHOD
    report |= {"note": note, "tolerance": agreement.RULE, "tokens": tokens, "shrink": shrink}
    report["models"] = {model.name: {"source": model.source, "sizes": model.sizes()} for model in models}
    console.print(_heading(report), highlight=False, markup=False, soft_wrap=True)
    names = [provider.name for provider in found]
    results: list[Result] = []
    for model in models:
        for dtype in dtypes:
            measured = _measure(console, model, dtype, tokens, kernels, found)
            if measured:
                showing.show(console, measured, names)
            else:
                console.print(f"{model.name} has nothing of {', '.join(kernels)}", highlight=False)
            results += measured
    if not any(result.figures for result in results):
        nothing = f"none of the models has a call of {', '.join(kernels)}"
        raise choices.CannotRunError(next((str(result.refused) for result in results), nothing))
    if plot is not None:
        showing.plot(plot, results, names, f"{report['device']}, {dtypes[0]}, {tokens} tokens{_shrunk(shrink)}")
        console.print(f"drawn into {plot}", highlight=False, soft_wrap=True)
    if as_json:
        typer.echo(json.dumps(report | {"results": [result.to_dict() for result in results]}, indent=2))
    return any(result.wrong and result.provider == providers.OURS for result in results)


def _measure(
    console: Console, model: Model, dtype: str, tokens: int, kernels: list[str], found: list[Provider]
) -> list[Result]:
    from kernels_ext_npu.benchmarking import run

    results: list[Result] = []
    with console.status(f"{model.name}, {dtype}") as status:
        for result in run.run(model, dtype, tokens, kernels, found):
            results.append(result)
            status.update(f"{model.name}, {dtype}, {result.phase}, {result.provider}: {result.name}")
    return results


def _heading(report: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in report["versions"].items())
    return f"{report['device']}{_shrunk(report['shrink'])}\n{versions}\n{report['note']}\n{report['tolerance']}\n"


def _shrunk(by: int) -> str:
    return f", widths, heads and experts divided by {by}" if by > 1 else ""
