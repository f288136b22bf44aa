"""``kernels-ext-npu benchmark``: what calls of real models cost, by their original, by our kernels and by others'."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kernels_ext_npu import environment
from kernels_ext_npu.benchmarking import options
from kernels_ext_npu.cli.terminal import AsJson, check_file, console, print_json, say, take_device, write_file
from kernels_ext_npu.environment import RefusedError
from kernels_ext_npu.model_configs import PUBLISHED

if TYPE_CHECKING:
    from kernels_ext_npu.benchmarking.measured_calls import Result


def benchmark(
    model: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(PUBLISHED)}, or what `inspect` takes; repeatable. By default all of these."),
    ] = None,
    kernel: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{', '.join(options.MODEL_KERNELS[:-2])}, layer for whole ones, step for whole models; repeatable, "
            "all of these by default. Or operators: pairs of calls that compute the same."
        ),
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="bf16 or fp16; repeatable. Both by default.")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=16, help="Of a prefill and of a training step: 4096, on the software device 64.")
    ] = None,
    shrink: Annotated[
        int | None, typer.Option(min=1, help="Divide widths, heads and experts: by 1, on the software device by 8.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=2, help="How many times each call is timed on a card.")] = options.REPEATS,
    report: Annotated[
        Path | None,
        typer.Option(help="On a card: a JSON file with every figure, to attach to an issue. It names no one."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure kernels, decoder layers and steps of real models against transformers' and, where installed,
    LLaMA-Factory's.

    Prefill, decoding and training; forward, backward and both. What disagrees with the original has no figures. On a
    card: times between device events, launches, bytes and memory; on the software device all but times, and so no
    --report. Ends with 0, with 1 if one of our kernels disagreed or failed, with 2 if nothing could be measured.
    """
    names = options.choose("--model", model or [], PUBLISHED, others=True)
    kernels = options.choose("--kernel", kernel or options.MODEL_KERNELS, options.KERNELS)
    dtypes = options.choose_dtypes(dtype or [])
    check_file("--report", report)
    take_device(needed=True)
    environment.check()
    options.check_device(dtypes)
    import softnpu
    from kernels_ext_npu.benchmarking import (
        agreement,
        call_costs,
        measured_calls,
        operator_pairs,
        providers,
        results_layout,
    )
    from kernels_ext_npu.benchmarking.shrunk_models import load
    from kernels_ext_npu.machine import description
    from kernels_ext_npu.machine.privacy import report_text

    software = softnpu.is_software()
    if software and report is not None:
        raise RefusedError(f"--report: {call_costs.NO_TIMES}")
    tokens, shrink = tokens or (64 if software else 4096), shrink or (8 if software else 1)
    from_models = [name for name in kernels if name in options.MODEL_KERNELS]
    models = [load(name, shrink) for name in names] if from_models else []
    shown = console(stderr=as_json)
    if not shown.is_terminal:  # then nothing says how wide it is
        shown.width = max(shown.width, 140)
    found, llama_factory = providers.providers()
    machine = description.describe() | {"LLaMA-Factory": llama_factory}
    note = call_costs.NO_TIMES if software else call_costs.method(repeats)
    device, versions = description.device(machine), description.versions(machine)
    sizes = {"tolerance": agreement.RULE, "tokens": tokens, "shrink": shrink}
    shrunk = f", widths, heads and experts divided by {shrink}" if shrink > 1 else ""
    named = ", ".join(f"{name} {value}" for name, value in versions.items())
    say(shown, f"{device}{shrunk}\n{named}\n{note}\n{agreement.RULE}\n")
    parts = [
        (each.name, precision, tuple(found), measured_calls.run(each, precision, from_models, tokens, repeats, found))
        for each in models
        for precision in dtypes
    ]
    if options.OPERATORS in kernels:
        run = partial(operator_pairs.run, shrink=shrink, repeats=repeats)
        parts += [(operator_pairs.NAME, each, operator_pairs.PROVIDERS, run(each)) for each in dtypes]
    results: list[Result] = []
    for name, precision, providing, running in parts:
        measured: list[Result] = []
        with shown.status(f"{name}, {precision}") as status:
            for result in running:
                measured.append(result)
                status.update(f"{name}, {precision}, {result.phase}, {result.provider}: {result.name}")
        results += measured
        if measured:
            results_layout.show(shown, measured, list(providing))
        else:
            say(shown, f"{name} has nothing of {', '.join(from_models)}")
        if report is not None:  # each time: what comes next may end the process
            head = {"machine": machine, "method": note} | sizes
            head["models"] = [{"name": one.name} | one.sizes() for one in models]
            write_file("--report", report, report_text(head, results_layout.report_lines(results)))
    if not any(result.figures for result in results):
        nothing = f"none of the models has a call of {', '.join(kernels)}"
        raise RefusedError(next((str(result.refused) for result in results), nothing))
    if report is not None:
        say(shown, f"Wrote {report}: it can be attached to an issue as it is.")
    if as_json:
        said = {"device": device, "versions": versions, "note": note} | sizes
        said["models"] = {each.name: {"source": each.source, "sizes": each.sizes()} for each in models}
        print_json(said | {"results": [result.to_dict() for result in results]})
    raise typer.Exit(int(any(result.wrong and result.provider == providers.OURS for result in results)))
