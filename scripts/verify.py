"""Verify a published kernel, a folder or a cache: ``python scripts/verify.py kernels-ext-npu/RMSNorm --version 1``."""

import typer

from kernels_ext_npu.cli.verify import verify

if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(verify)
    app()
