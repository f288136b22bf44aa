"""``kernels-ext-npu bundle``: all kernels in one file, for machines without internet."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from kernels_ext_npu.cli.refusals import refusing
from kernels_ext_npu.sources import ORGANISATION


@refusing()
def bundle(
    output: Annotated[Path | None, typer.Option(help="Make a bundle of all kernel repositories, here.")] = None,
    source: Annotated[str, typer.Option(help="For --output: bundled, hub, or the path of a clone.")] = "bundled",
    install: Annotated[Path | None, typer.Option(help="Check this bundle and put it into the Hub's cache.")] = None,
) -> None:
    """Carry the kernels to where there is no internet: one file, which is checked when it is installed.

    Ends with 1 and every reason if it refuses; then nothing was written.
    """
    from kernels_ext_npu.distribution.bundle_archive import BundleError

    if (output is None) == (install is None):
        raise typer.BadParameter("give either --output or --install")
    with refusing(BundleError, OSError, code=1):
        for line in _write(output, source) if output else _install(install) if install else ():
            typer.echo(line)


def _write(output: Path, source: str) -> Iterator[str]:
    from kernels_ext_npu.distribution import bundles

    for made in bundles.write(output, source):
        yield f"{ORGANISATION}/{made.name} v{made.version}, commit {made.commit}: {len(made.files)} files"
    digest = hashlib.sha256(output.read_bytes()).hexdigest()
    yield f"wrote {output}, {output.stat().st_size} bytes, sha256 {digest}"


def _install(archive: Path) -> Iterator[str]:
    from kernels_ext_npu.distribution import bundles, hub_cache

    for place in bundles.install(archive):
        repository = place.repository
        changes = {repository.commit: "was there already", None: "is new"}
        change = changes.get(place.before, f"in place of {place.before}, whose files stay in the cache")
        yield f"{ORGANISATION}/{repository.name} v{repository.version}, commit {repository.commit}: {change}"
    yield f"installed in {hub_cache.folder()}"
    yield "Set HF_HUB_OFFLINE=1 before Python starts: without it kernels asks the Hub which versions there are."
