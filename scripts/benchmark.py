"""Print how long the host is busy on this machine: with forwards, with imports, with models and with commands.

``make benchmark``. It asserts nothing: what these ask of the host is the same on every machine, and tests count it.
"""

from __future__ import annotations

import math
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from time import process_time

import softnpu  # before torch

# isort: split
import torch
from host_time import host_times, stopped_clock
from rich import box
from rich.console import Console
from rich.table import Table

import kernels_ext_npu
from tests.support.forwards import compared
from tests.support.kernelizing import STEPS, qwen3_235b_a22b

RUNS = 3
SIDES = ("kernels-ext-npu", "LLaMA-Factory", "transformers")
IMPORTS = {
    "import torch, torch_npu": "import torch, torch_npu",
    "import softnpu": "import softnpu",
    "import transformers": "import softnpu, transformers; from transformers import PreTrainedModel",
    "register()": (
        "import softnpu, transformers; from transformers import PreTrainedModel; "
        "import kernels_ext_npu; kernels_ext_npu.register()"
    ),
}
COMMANDS = (
    "coverage",
    "inspect Qwen3-235B-A22B",
    "inspect Qwen3-235B-A22B --tp 4",
    "inspect Qwen3-235B-A22B --tp 4 --ep 8 --fsdp 16",
)


def main() -> None:
    """Print a table for each kind of work, as soon as it is measured."""
    console = Console(highlight=False)
    if not console.is_terminal:  # then nothing says how wide it is
        console.width = max(console.width, 100)
    kernels_ext_npu.register()
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        console.print(f"Forwards in {name}, microseconds", style="bold")
        console.print(_table(("forward", "mode", *SIDES), _forwards(dtype)))
    kernels_ext_npu.unregister()
    console.print("Qwen3-235B-A22B, 94 layers on meta, seconds of the processor", style="bold")
    console.print(_table(("call", "seconds"), _steps()))
    console.print("Processes, seconds of the processor", style="bold")
    console.print(_table(("process", "seconds"), _processes()))


def _table(columns: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 or column == "mode" else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _forwards(dtype: torch.dtype) -> Iterator[tuple[str, ...]]:
    """What the device computes does not count; a step of training is a forward and a backward."""
    with stopped_clock():
        for name, case in compared(dtype).items():
            for training in (False, True):
                steps, prepare = case.steps(training)
                with torch.set_grad_enabled(training):
                    times = host_times(dict(zip(SIDES, steps)), turns=10, prepare=prepare)
                yield name, "training" if training else "inference", *(f"{times[side] * 1e6:.0f}" for side in SIDES)


def _steps() -> Iterator[tuple[str, ...]]:
    least = dict.fromkeys(STEPS, math.inf)
    for _ in range(RUNS):
        model = qwen3_235b_a22b(94).train()
        for name, step in STEPS.items():
            start = process_time()
            step(model)
            least[name] = min(least[name], process_time() - start)
    return ((name, f"{seconds:.2f}") for name, seconds in least.items())


def _processes() -> Iterator[tuple[str, ...]]:
    for name, code in IMPORTS.items():
        yield name, f"{min(_seconds([sys.executable, '-c', code]) for _ in range(RUNS)):.2f}"
    run = "import softnpu, sys; from kernels_ext_npu.cli import app; app(sys.argv[1:])"
    for command in COMMANDS:
        yield command, f"{_seconds([sys.executable, '-c', run, *command.split()]):.1f}"


def _seconds(command: list[str]) -> float:
    """What a process takes of the processor."""
    environment = dict(os.environ)
    if softnpu.is_software():  # what it set in this process is not what others start with
        home = environment["ASCEND_HOME_PATH"]
        environment = {name: value for name, value in environment.items() if not name.startswith("ASCEND_")}
        if "softnpu" not in " ".join(command):  # as CANN's own script does
            environment |= {"LD_LIBRARY_PATH": home, "ASCEND_HOME_PATH": home, "ASCEND_OPP_PATH": f"{home}/opp"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env=environment, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
