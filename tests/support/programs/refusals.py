"""What a side may refuse: what both do, what a plain model on the NPU does too, and what a sentence of ours says."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import kernels_ext_npu
from tests.support.programs.registry import ACTS
from tests.support.programs.side import Side

if TYPE_CHECKING:
    from tests.support.programs.program import Program

DECODING = ("generate", "call_token_by_token", "decode_some_tokens")
# what ours refuse, with sentences of docs/troubleshooting.md, by act; nothing has changed then
DOCUMENTED: dict[str, str] = {
    "transpose_experts": "transpose_experts: ",
    # who names ours, with a layer that is there twice, and keeps two rows of keys for each token; others have sdpa then
    **dict.fromkeys(DECODING, "attention_mask is for"),
    # of a copy, or of what was loaded, once kernels are unregistered
    "call": "(npu_grouped_mm. is not a valid experts|npu_flash_attention. is not a valid attention) implementation",
}

# what torch leaves half done where it raises, and differently on two devices
HALF_DONE = {"swap_parameters_in_conversions"}


def judge(program: Program, name: str, seed: int, refused: dict[str, Exception | None]) -> None:
    """Accept a refusal and let go of it, or raise it. After one that is not the same for both the program is over.

    What each side raised is taken out, since it keeps what was computed until then.
    """
    error = refused.pop("npu", None)
    of_twin = type(refused.pop("cpu", None))
    if error is None:  # the twin alone: the device can do more than the CPU, or the model more than a plain one
        program.is_over = True
        return
    if type(error) is of_twin:
        program.is_over = name in HALF_DONE
        return
    if name in DOCUMENTED and re.search(DOCUMENTED[name], str(error)):
        program.is_over = name == "call"
        program.model.shown, program.twin.shown = [], []
        return
    program.is_over = True
    if on_a_plain_npu(program, _repeated(name, seed)) is None:
        raise error


def raised(what: Callable[[], object]) -> Exception | None:
    """Do something, and return what it raises."""
    try:
        what()
    except Exception as error:
        return error
    return None


def on_a_plain_npu(program: Program, what: Callable[[Side], object]) -> Exception | None:
    """Live through a program once more without kernels on the NPU, do something there, and return what it raises."""
    kernels_ext_npu.unregister()
    side = Side(program.variant, "npu", False, program.folder / "plain")
    side.folder.mkdir(exist_ok=True)
    try:
        for done, number in program.done:
            with suppress(Exception):  # a refusal that was accepted
                ACTS[done].do(side, number)
        return raised(lambda: what(side))
    finally:
        side.close()


def _repeated(name: str, seed: int) -> Callable[[Side], object]:
    if name == "call":
        return lambda side: side.run().loss.backward()
    return lambda side: ACTS[name].do(side, seed)
