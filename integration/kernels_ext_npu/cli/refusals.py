"""How a command says that it cannot do what was asked: one sentence on standard error, and an exit code."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

import typer


class RefusedError(Exception):
    """What was asked for cannot be done. The message says what can."""


@contextmanager
def refusing(*errors: type[Exception], code: int = 2) -> Iterator[None]:
    """End the program with the message of any of these errors, or of a RefusedError, and with a code.

    A context, and a decorator of a whole command.
    """
    caught: tuple[type[Exception], ...] = (RefusedError, *errors)
    try:
        yield
    except caught as error:
        typer.echo(f"kernels-ext-npu: {error}", err=True)
        raise typer.Exit(code) from error


def take_device(needed: bool) -> None:
    """Import the software device, which has to be before torch, and changes nothing where there is an NPU.

    Where it cannot be imported, since there is no torch_npu or no compiler, a command that computes on it is refused.
    One that only reads goes on, as on a machine without an NPU; but where torch_npu is installed, torch loads it by
    itself and would fail, so that is refused too.

    Raises:
        RefusedError: it cannot be imported; the message says why.
    """
    try:
        import softnpu  # noqa: F401
    except ImportError as error:
        if needed or importlib.util.find_spec("torch_npu") is not None:
            raise RefusedError(str(error)) from error
