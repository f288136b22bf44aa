"""Rebuilds the whole steps of ``tests/data/measured.json`` with the kernels, and estimates them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch._subclasses import FakeTensorMode

import kernels_ext_npu
from kernels_ext_npu.inspection import subject
from kernels_ext_npu.inspection.counting.dispatch import Counting
from kernels_ext_npu.inspection.counting.known_values import KnownValues
from kernels_ext_npu.inspection.counting.phases import STATIC, count
from kernels_ext_npu.inspection.mesh import Mesh, distributed
from kernels_ext_npu.measuring.estimate import Estimate
from kernels_ext_npu.measuring.roofline import SOCS


class Step(NamedTuple):
    """A step that somebody published, and what is estimated of it, in seconds."""

    name: str
    published: float
    estimate: Estimate
    is_graph: bool

    @property
    def estimated(self) -> float:
        """The seconds of a prefill, or of a graph that decodes a token."""
        return self.estimate.graph if self.is_graph else self.estimate.seconds

    @property
    def off(self) -> float:
        """How far the estimate is from what was published, as a part of that."""
        return self.estimated / self.published - 1


def rebuild(case: dict[str, Any]) -> Step:
    """Count a step as engines run it: of a prefill they compute the logits of the last token of each row alone."""
    found, values, soc = subject.find(case["model"]), KnownValues(), SOCS[case["chip"]]
    if "config" in case:
        settings = found.config.to_dict() | {"layer_types": None} | case["config"]
        found = replace(found, config=type(found.config).from_dict(settings))
    fake, mesh = FakeTensorMode(allow_non_fake_inputs=True), Mesh(tp=case["tp"])
    with fake, Counting(values, soc):
        model = subject.build(found, torch.bfloat16)
    with distributed(model, mesh) as axes, fake:
        inputs, _ = subject.make_inputs(model, case["batch"], case["tokens"], values)
        is_graph = case["phase"] == STATIC
        given = inputs if is_graph else inputs | {"logits_to_keep": 1}
        kernels_ext_npu.register()
        try:
            kernels_ext_npu.kernelize(model)
            counts = count(case["phase"], model, given, values, soc, axes)
            kernels_ext_npu.restore(model)
        finally:
            kernels_ext_npu.unregister()
    name = f"{case.get('name', case['model'])}, {case['batch']} x {case['tokens']}, {case['phase']}"
    return Step(name, 1e-3 * case["ms"], counts.estimate, is_graph)
