"""Acts in which something goes wrong in the middle, and the user goes on."""

import inspect
import sys
from contextlib import suppress
from random import Random
from types import FrameType
from typing import Any

import kernels_ext_npu
from tests.support.programs.acts.hooks import HOOKED
from tests.support.programs.acts.training import can_train
from tests.support.programs.registry import act
from tests.support.programs.side import Side

CALLS = (1, 3, 10, 30, 100, 300, 1000)  # until somebody interrupts


class StoppedError(RuntimeError):
    """What goes wrong."""


def stop(*args: Any) -> None:
    """Go wrong."""
    raise StoppedError


@act()
def fail_in_a_forward(side: Side, choice: Random) -> None:
    _, module = choice.choice(side.named(*HOOKED))
    handle = module.register_forward_hook(stop)
    with suppress(StoppedError):
        side.run()
    handle.remove()


@act(can_train)
def fail_in_a_backward(side: Side, choice: Random) -> None:
    _, module = choice.choice(side.named("Linear", "Norm", "MLP", "Experts", "Attention", "DeltaNet", "Mlp"))
    handle = module.register_full_backward_hook(stop)
    with suppress(StoppedError):
        side.run().loss.backward()
    side.model.zero_grad()
    handle.remove()


def _interrupt(side: Side, what: Any, calls: int) -> None:
    """Stop a function of ours after so many calls of functions of ours, as somebody at a keyboard does."""
    left = calls

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left
        is_generator = frame.f_code.co_flags & inspect.CO_GENERATOR  # what is raised in one that ends is lost
        if event == "call" and "kernels_ext_npu" in frame.f_code.co_filename and not is_generator:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        with suppress(KeyboardInterrupt):
            what(side.model)
    finally:
        sys.setprofile(before)


@act(lambda side: side.device.type == side.home, is_ours=True)
def interrupt_kernelize(side: Side, choice: Random) -> None:
    _interrupt(side, kernels_ext_npu.kernelize, choice.choice(CALLS))


@act(is_ours=True)
def interrupt_restore(side: Side, choice: Random) -> None:
    _interrupt(side, kernels_ext_npu.restore, choice.choice(CALLS))
