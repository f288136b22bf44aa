"""The rows of ``tests/data/measured.json``, each with the workload that our counts make of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch_npu
from torch._subclasses import FakeTensorMode

from estimating.modules import make
from kernels_ext_npu.inspection.counting.dispatch import Counting
from kernels_ext_npu.inspection.counting.known_values import KnownValues
from kernels_ext_npu.measuring.estimate import Workload
from kernels_ext_npu.measuring.roofline import SOCS

FILE = Path(__file__).resolve().parents[2] / "tests" / "data" / "measured.json"
MODES = ("forward", "backward", "full", "no-grad-forward")
WORKSPACES = {"matmul": 20, "norm": 16}  # MiB, see `workspace`


@dataclass(frozen=True)
class Row:
    """A time that somebody measured.

    Attributes:
        name: what ran, with its size.
        mode: forward, backward or both; empty where there is one way alone.
        seconds: that were measured.
        work: what it is made of, by the names of the rates.
    """

    name: str
    mode: str
    seconds: float
    work: Mapping[str, float]


@dataclass(frozen=True)
class Peak:
    """A peak of memory that somebody measured, and ours without and with the workspaces of kernels, in MiB."""

    name: str
    measured: float
    counted: float
    with_workspaces: float


def read() -> dict[str, Any]:
    """Read the file."""
    return json.loads(FILE.read_text("utf-8"))


def module_rows(data: dict[str, Any]) -> tuple[list[Row], list[Peak]]:
    """Count the modules on fake tensors, and return their times and peaks."""
    rows: list[Row] = []
    peaks: list[Peak] = []
    for case in data["modules"]:
        name = f"{case['module']} {case['x']}"
        found, counted, with_workspaces = _count(case)
        rows += [Row(name, mode, 1e-3 * case[mode], found[mode]) for mode in MODES if mode in case]
        if "memory" in case:
            peaks.append(Peak(name, case["memory"], counted, with_workspaces))
    return rows, peaks


def attention_rows(data: dict[str, Any]) -> list[Row]:
    """Count the attention of one head."""
    return [
        Row(f"attention {case['tokens']}, {case['chip']}", "", 1e-6 * case["us"], _attention(**case))
        for case in data["attention"]
    ]


def product_rows(data: dict[str, Any]) -> list[Row]:
    """Count products of square matrices."""
    return [Row(f"product {case['size']}", "", 1e-3 * case["ms"], _product(case["size"])) for case in data["products"]]


def collective_rows(data: dict[str, Any]) -> list[Row]:
    """Count collectives that were timed alone, over the first devices of a server."""
    rows = []
    for case in data["collectives"]:
        workload = Workload(SOCS[case["chip"]])
        workload.add_collective(case["operator"], range(case["ranks"]), case["bytes"], is_beside=False)
        name = f"{case['operator']} of {case['bytes']:,} bytes, {case['ranks']} x {case['chip']}"
        rows.append(Row(name, "", 1e-6 * case["us"], _on_device(workload)))
    return rows


def graph_kernel_rows(data: dict[str, Any]) -> list[Row]:
    """Return kernels in graphs that move next to nothing."""
    return [
        Row(f"{case['kernel']}, {case['model']}", "", 1e-6 * case["us"], {"graph_kernel": 1.0})
        for case in data["graph_kernels"]
    ]


def apart_rows(data: dict[str, Any]) -> dict[str, list[Row]]:
    """Return the rows that rates of their own are fitted to."""
    return {
        "attention": attention_rows(data),
        "collectives": collective_rows(data),
        "graph_kernels": graph_kernel_rows(data),
    }


def report_rows(data: dict[str, Any]) -> list[Row]:
    """Return what reports of benchmarks brought, whose workloads were counted on the card."""
    return [Row(case["name"], case["mode"], 1e-3 * case["ms"], case["work"]) for case in data["reports"]]


class _Counting(Counting):
    """A count that keeps a second peak, with the memory that kernels ask for whatever they compute.

    Kernels of products take 20 MiB (`RPC_WORKSIZE`, ops-nn matmul/mat_mul_v3/op_host/…/matmul_v3_base_tiling), those
    whose tiling asks for the library's 16 MiB (`GetLibApiWorkSpaceSize`, CANN's platform_ascendc): norms, of these.
    """

    def __init__(self, chip: str = "910b2") -> None:
        self.peak = 0
        super().__init__(KnownValues(), SOCS[chip])

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        before = self.memory.peak
        self.memory.peak = 0
        result = super().__torch_dispatch__(operator, types, args, kwargs)
        own = next((size for part, size in WORKSPACES.items() if part in operator._schema.name), 0)
        self.peak = max(self.peak, self.memory.peak + own * 2**20)
        self.memory.peak = max(before, self.memory.peak)
        return result


def _count(case: dict[str, Any]) -> tuple[dict[str, dict[str, float]], float, float]:
    """Count a module in each mode, behind a first run, with an empty cache, as `triton.testing.do_bench` clears it."""
    work: dict[str, dict[str, float]] = {}
    with FakeTensorMode(allow_non_fake_inputs=True), _Counting() as costs:
        module = make(case["module"], case["x"], case["config"])
        module.run()

        def count(mode: str, run: Any) -> Any:
            costs.workload.start()
            result = run()
            starts = {"start": mode != "backward", "start_backward": mode != "forward"}
            work[mode] = costs.workload.parts | starts
            return result

        outputs = count("forward", module.outputs)
        gradients = module.make_gradients(outputs)
        module.drop()
        count("backward", partial(module.backward, outputs, gradients))
        del outputs, gradients
        if "full" in case:
            if module.drops:
                module.drop()
            count("full", module.run)
        costs.memory.peak = costs.memory.current
        costs.peak = 0
        if "memory" in case:
            module.run()
        peaks = costs.memory.peak / 2**20, costs.peak / 2**20
    return work | {"no-grad-forward": work["forward"]}, *peaks


def _attention(chip: str, tokens: int, us: float) -> dict[str, float]:
    with FakeTensorMode(), _Counting(chip) as costs:
        q, k, v = torch.empty(3, 1, 1, tokens, 128, dtype=torch.float16, device="npu")
        costs.workload.start()
        torch_npu.npu_fusion_attention(q, k, v, 1, "BNSD")
    return _on_device(costs.workload)


def _product(size: int) -> dict[str, float]:
    with FakeTensorMode(), _Counting() as costs:
        left, right = torch.empty(2, size, size, dtype=torch.float16, device="npu")
        costs.workload.start()
        torch.mm(left, right)
    return _on_device(costs.workload)


def _on_device(workload: Workload) -> dict[str, float]:
    """Return the parts of what was timed on the device alone."""
    return {name: amount for name, amount in workload.parts.items() if "launch" not in name}


def halves(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """Split rows: of each four the first and the last are fitted, and the others test.

    Where a size has a forward and a backward, one of them is in each half, by turns.
    """
    numbered = list(enumerate(rows))
    return [row for i, row in numbered if i % 4 in (0, 3)], [row for i, row in numbered if i % 4 in (1, 2)]
