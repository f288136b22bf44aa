"""The process that computes: it says what it does before it does it, so that a crash or a hang has a name.

It writes a line of JSON for the machine, one with all ids, and two for each piece, at its start and at its end.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any


def main(source: str, quick: bool, only: list[str], done: list[str]) -> None:
    """Do what is not done yet, and end the process.

    Args:
        source: where the kernels come from, as register() takes it.
        quick: whether only a part is wanted.
        only: parts of the ids that are wanted; all of them without any.
        done: the ids of what another process did, or ended at.
    """
    channel = os.dup(1)
    os.dup2(2, 1)  # what libraries print to standard output is none of our lines
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "TORCH_CPP_LOG_LEVEL": "ERROR"}

    def say(**entry: Any) -> None:
        os.write(channel, json.dumps(entry).encode() + b"\n")

    code = 0
    try:
        import softnpu  # noqa: F401  before torch; changes nothing where there is a card

        # isort: split
        from kernels_ext_npu import environment
        from kernels_ext_npu.selftest import machine

        environment.check()
        say(machine=machine.describe())
        from kernels_ext_npu.selftest import work

        pieces = {identity: piece for identity, piece in work.pieces(quick).items() if _is_wanted(identity, only)}
        say(ids=list(pieces))
        for identity, run in pieces.items():
            if identity in done:
                continue
            say(begins=identity)
            try:
                found = run(source)
            except Exception as error:
                traceback.print_exc()
                say(ends=identity, error=f"{type(error).__name__}: {error}")
                if not _works():
                    break  # the next process goes on
                continue
            say(ends=identity, **found)
        else:
            say(ended=True)
    except BaseException as error:
        traceback.print_exc()
        told = isinstance(error, RuntimeError | ImportError)  # these say what to do
        say(failed=str(error) if told else f"{type(error).__name__}: {error}")
        code = 1
    sys.stderr.flush()
    os._exit(code)  # what happens in the exit handlers of torch_npu is not what was asked


def _is_wanted(identity: str, only: list[str]) -> bool:
    return not only or any(part.lower() in identity.replace(" | ", ", ").lower() for part in only)


def _works() -> bool:
    """Tell whether the device still computes: after an error on a card all that follows may fail."""
    import torch

    try:
        return (torch.ones(1, device="npu") + 1).item() == 2
    except RuntimeError:
        return False
