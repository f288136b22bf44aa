"""The process that computes: it says what it does before it does it, so that a crash or a hang has a name."""

from __future__ import annotations

import os
import traceback

from kernels_ext_npu import environment
from kernels_ext_npu.catalogue import REPOSITORIES
from kernels_ext_npu.distribution import published, sources
from kernels_ext_npu.environment import RefusedError
from kernels_ext_npu.machine.processes import say


def work(source: str, quick: bool, only: list[str], done: list[str]) -> None:
    """Do what is not done yet: say the machine, all ids, and each piece at its start and at its end.

    Args:
        source: where the kernels come from, as register() takes it.
        quick: whether only a part is wanted.
        only: parts of the ids that are wanted; all of them without any.
        done: the ids of what another process did, or ended at.
    """
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    try:
        import softnpu  # noqa: F401  before torch; changes nothing where there is a card

        # isort: split
        from kernels_ext_npu.machine import description

        environment.check()
        sources.check(source, REPOSITORIES)
        say(machine=description.describe())
        if source == "hub":  # without a kernel from there every piece would wait for one
            try:
                sources.load_package("hub", REPOSITORIES[0])
            except published.FAILURES as error:
                raise RefusedError(f"the kernels cannot be loaded from the Hub: {error}") from error
    except (RuntimeError, ImportError, FileNotFoundError, RefusedError) as error:  # these say what to do
        say(failed=str(error))
        return
    from kernels_ext_npu.selftest import pieces

    wanted = {identity: piece for identity, piece in pieces.pieces(quick, source).items() if _is_wanted(identity, only)}
    refused = pieces.refused()
    say(ids=list(wanted))
    for identity, piece in wanted.items():
        if identity in done:
            continue
        say(begins=identity, refused=identity in refused)
        try:
            found = piece()
        except Exception as error:
            traceback.print_exc()
            say(ends=identity, error=f"{type(error).__name__}: {error}")
            if not _works():
                say(done=False)  # the next process goes on
                return
        else:
            say(ends=identity, **found)
    say(done=True)


def _is_wanted(identity: str, only: list[str]) -> bool:
    return not only or any(part.lower() in identity.replace(" | ", ", ").lower() for part in only)


def _works() -> bool:
    """Tell whether the device still computes: after an error on a card all that follows may fail."""
    import torch

    try:
        return (torch.ones(1, device="npu") + 1).item() == 2
    except RuntimeError:
        return False
