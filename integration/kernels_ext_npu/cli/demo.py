"""``kernels-ext-npu demo``: kernels swapped into models, which are then compared with their originals."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kernels_ext_npu.cli.terminal import TrustRemoteCode, console, take_device


def demo(
    model: Annotated[
        Path | None,
        typer.Option(help="A local checkpoint of a causal language model, in place of ten tiny random ones."),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Load models with use_kernels=True and compare them with their originals on the CPU.

    Runs on the software device where there is no NPU. Ends with 1 if anything disagrees.
    """
    take_device(needed=True)
    from kernels_ext_npu.demo.demonstration import show

    raise typer.Exit(0 if show(console(), model, trust_remote_code) else 1)
