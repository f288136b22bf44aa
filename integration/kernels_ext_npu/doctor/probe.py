"""What runs in the process of a probe: it notes what it does and finds out, a line of JSON each."""

from __future__ import annotations

import json
import os
import sys
import traceback
from importlib import import_module
from typing import Any

_channel = -1


def main(name: str, arguments: dict[str, Any]) -> None:
    """Run `probe(**arguments)` of a module beside this one, and end the process."""
    global _channel
    _channel = os.dup(1)
    os.dup2(2, 1)  # what libraries print to standard output is none of our notes
    try:
        import_module(f"kernels_ext_npu.doctor.{name}").probe(**arguments)
        _write({"ended": True})
    except BaseException as error:
        traceback.print_exc()
        _write({"errors": _chain(error)})
    sys.stderr.flush()
    os._exit(0)  # what happens in the exit handlers of torch_npu is not what was asked


def step(name: str) -> None:
    """Note what begins here; the step before is done."""
    _write({"step": name})


def note(**facts: Any) -> None:
    """Note facts, which are kept whatever happens later."""
    _write({"facts": facts})


def _chain(error: BaseException) -> list[str]:
    errors: list[str] = []
    link: BaseException | None = error
    while link is not None and len(errors) < 10:
        text = str(link).strip()
        errors.append(f"{type(link).__name__}: {text}" if text else type(link).__name__)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return errors


def _write(entry: dict[str, Any]) -> None:
    os.write(_channel, json.dumps(entry, default=str).encode() + b"\n")
