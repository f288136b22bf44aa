"""Choices of the benchmark's options, and the error for any other value."""

from __future__ import annotations

from collections.abc import Iterable

from kernels_ext_npu.catalogue import CATALOGUE
from kernels_ext_npu.environment import RefusedError, choices

MODEL_KERNELS = (*(repository.name for repository in CATALOGUE), "layer", "step")
OPERATORS = "operators"  # pairs of calls, whatever the model
KERNELS = (*MODEL_KERNELS, OPERATORS)
REPEATS = 50  # how often a call is timed on a card
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def choose(option: str, asked: Iterable[str], known: Iterable[str], others: bool = False) -> list[str]:
    """Return the known names that were asked for, in capital letters or not; all of them if none was.

    Args:
        others: whether other names are taken as they are: what those of models mean shows when they are read.
    """
    by_name = {name.lower(): name for name in known}
    for name in asked:
        if name.lower() not in by_name and not others:
            raise RefusedError(f"{option} {name}: {choices(name, known)}")
    return list(dict.fromkeys(by_name.get(name.lower(), name) for name in asked)) or list(by_name.values())


def choose_dtypes(asked: Iterable[str]) -> list[str]:
    """Return the short names of the dtypes that were asked for, by these or by torch's names; all if none was."""
    short = {long: name for name, long in DTYPES.items()}
    return choose("--dtype", [short.get(name.lower(), name) for name in asked], DTYPES)


def check_device(dtypes: list[str]) -> None:
    """Raise RefusedError if there is no device, or it does not have one of the dtypes."""
    import torch_npu

    if not torch_npu.npu.is_available():
        raise RefusedError(
            "torch_npu finds no device that it may use: look at `npu-smi info`, at ASCEND_RT_VISIBLE_DEVICES, and at "
            "who may read /dev/davinci*"
        )
    if "bf16" in dtypes and not torch_npu.npu.is_bf16_supported():
        raise RefusedError(f"--dtype bf16: {torch_npu.npu.get_device_name(0)} has no bfloat16; use --dtype fp16")
