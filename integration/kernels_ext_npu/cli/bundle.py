"""``kernels-ext-npu bundle``: all kernels in one file, for machines without internet."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import typer

from kernels_ext_npu.distribution.sources import ORGANISATION


def bundle(
    output: Annotated[Path | None, typer.Option(help="Make a bundle of all kernel repositories, here.")] = None,
    source: Annotated[str, typer.Option(help="For --output: bundled, hub, or the path of a clone.")] = "bundled",
    install: Annotated[Path | None, typer.Option(help="Check this bundle and put it into the Hub's cache.")] = None,
) -> None:
    """Carry the kernels to where there is no internet: one file, which is checked when it is installed.

    Ends with 1 and every reason if it refuses; then nothing was written.
    """
    if (output is None) == (install is None):
        raise typer.BadParameter("give either --output or --install")
    from kernels_ext_npu.distribution import bundles

    if output is not None:
        for made in bundles.write(output, source):
            typer.echo(f"{ORGANISATION}/{made.name} v{made.version}, commit {made.commit}: {len(made.files)} files")
        digest = hashlib.sha256(output.read_bytes()).hexdigest()
        typer.echo(f"wrote {output}, {output.stat().st_size} bytes, sha256 {digest}")
    elif install is not None:
        for place in bundles.install(install):
            made = place.repository
            changes = {made.commit: "was there already", None: "is new"}
            change = changes.get(place.before, f"in place of {place.before}, whose files stay in the cache")
            typer.echo(f"{ORGANISATION}/{made.name} v{made.version}, commit {made.commit}: {change}")
        typer.echo(f"installed in {bundles.cache_folder()}")
        typer.echo("Set HF_HUB_OFFLINE=1 before Python starts: without it kernels asks which versions there are.")
