"""The command line ``kernels-ext-npu``."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

import kernels_ext_npu
from kernels_ext_npu.cli.benchmark import benchmark
from kernels_ext_npu.cli.coverage import coverage
from kernels_ext_npu.cli.demo import demo
from kernels_ext_npu.cli.doctor import doctor
from kernels_ext_npu.cli.inspect import inspect
from kernels_ext_npu.cli.selftest import selftest
from kernels_ext_npu.cli.terminal import Commands
from kernels_ext_npu.cli.verify import verify

# what torchao says when transformers imports it, on every machine without CUDA
_NOISY = ("torchao", "torch.utils._pytree")

app = typer.Typer(
    cls=Commands,
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


for command in (demo, inspect, doctor, selftest, benchmark, coverage, verify):
    app.command()(command)
