"""Whether a report is true: what it calls swapped has a kernel in place, and nothing else has one."""

import sys
from random import Random
from typing import Any

import torch
from torch.nn.utils import parametrize

import kernels_ext_npu
from kernels_ext_npu.binding import forward_binding
from kernels_ext_npu.catalogue import ATTENTION, EXPERTS, HEADS, NORMS
from tests.support.programs.acts.kernels import stays_off_the_hub
from tests.support.programs.side import Side
from tests.support.rounding import launched

CHANGED = "changed since it was swapped in"
BY_NAME = (ATTENTION.in_models, EXPERTS.in_models, HEADS.in_models)  # no forward of theirs need be a kernel


def look_again(side: Side, seed: int) -> tuple[kernels_ext_npu.Report, bool]:
    """Return the report; where it names kernels that no longer fit, do what it says, and return the one after that.

    A change of the mode looks at kernels, too.

    Returns:
        The report, and whether something was done.
    """
    report = kernels_ext_npu.report(side.model)
    reasons = [row.reason for row in report if row.reason is not None and row.reason.startswith(CHANGED)]
    if not reasons:
        return report, False
    model = side.pretrained
    if seed % 2 and model.use_kernels and stays_off_the_hub(side):
        modes = {module: module.training for module in model.modules()}
        model.train(not model.training)
        for module, is_training in modes.items():  # of which parts may have another than the model
            module.training = is_training
    else:
        advised = {reason.rpartition("; ")[2].partition("(")[0] for reason in reasons}
        assert advised <= {"kernelize", "restore"}
        getattr(kernels_ext_npu, max(advised))(side.model)  # what restores needs no device
    return kernels_ext_npu.report(side.model), True


def assert_report_is_true(report: kernels_ext_npu.Report, side: Side, seed: int) -> None:
    """Compare every row with what is in place, and let a norm launch; values show in what whole models compute."""
    norms: list[tuple[kernels_ext_npu.Row, Any]] = []
    for row in report:
        module = side.model.get_submodule(row.module)
        place = module if row.function is None else vars(sys.modules[type(module).__module__])[row.function]
        if row.swapped and row.kind not in BY_NAME:
            assert forward_binding.our_forward(place) is not None, row
            if row.kind == NORMS.in_models and not ("Gated" in str(row.kernel) or parametrize.is_parametrized(module)):
                norms.append((row, module))
        elif not row.swapped and row.function is None and not (row.reason or "").startswith((CHANGED, "served by")):
            assert forward_binding.kernel_forward(module) is None, row
    if norms and side.device.type == "npu":
        row, norm = Random(seed).choice(norms)
        weight = next(norm.parameters(), torch.ones(32, device="npu"))
        x = torch.ones(2, len(weight)).to(weight)
        with torch.no_grad():
            launches = launched(lambda: forward_binding.our_forward(norm)(norm, x))
        assert any(name.startswith("npu_") for name in launches), row
