"""The command line ``kernels-ext-npu``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

import kernels_ext_npu
from kernels_ext_npu.cli.benchmark import benchmark
from kernels_ext_npu.cli.bundle import bundle
from kernels_ext_npu.cli.coverage import coverage
from kernels_ext_npu.cli.doctor import doctor
from kernels_ext_npu.cli.inspect import inspect
from kernels_ext_npu.cli.verify import verify

# what torchao says when transformers imports it, on every machine without CUDA
_NOISY = ("torchao", "torch.utils._pytree")

app = typer.Typer(
    help="Fused kernels for Huawei Ascend NPUs in Hugging Face transformers.",
    no_args_is_help=True,
    add_completion=False,
)


@app.callback(invoke_without_command=True)
def main(show: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if show:
        typer.echo(kernels_ext_npu.__version__)
        raise typer.Exit
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)


@app.command()
def demo(
    model: Annotated[
        Path | None,
        typer.Option(help="A local checkpoint of a causal language model, in place of ten tiny random ones."),
    ] = None,
) -> None:
    """Load models with use_kernels=True and compare them with their originals on the CPU.

    Runs on the software device where there is no NPU. Ends with 1 if anything disagrees.
    """
    try:
        from kernels_ext_npu.demo import run
    except ImportError as error:  # no compiler for the software device, no torch_npu
        raise _refusal(error) from error
    try:
        agreed = run.run(model)
    except (run.CannotRunError, kernels_ext_npu.UnsupportedEnvironmentError) as error:
        raise _refusal(error) from error
    raise typer.Exit(0 if agreed else 1)


app.command()(inspect)
app.command()(doctor)
app.command()(benchmark)
app.command()(bundle)
app.command()(coverage)
app.command()(verify)


def _refusal(error: Exception) -> typer.Exit:
    typer.echo(f"kernels-ext-npu: {error}", err=True)
    return typer.Exit(2)
