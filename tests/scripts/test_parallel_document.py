"""The tables of a rank: three layers tell what all of them cost."""

import pytest
from transformers import Qwen3MoeForCausalLM

from documents import parallel
from kernels_ext_npu.inspection.inspecting import inspect
from kernels_ext_npu.inspection.mesh import Mesh
from kernels_ext_npu.inspection.subject import Subject
from kernels_ext_npu.measuring.roofline import SOCS
from tests.support import zoo


@pytest.mark.long
def test_three_layers_tell_what_seven_cost() -> None:
    config = zoo.build("qwen3_moe", num_hidden_layers=7, num_experts=8).config
    subject, mesh = Subject("tiny", config, Qwen3MoeForCausalLM, []), Mesh(ep=2, fsdp=4)
    told = parallel.rank(subject, mesh, tokens=64)
    inspection = inspect(subject, SOCS["910b3"], tokens=64, mesh=mesh)
    assert told.weights == inspection.weights
    for phase, both in told.whole.items():
        for counts, variant in zip(both, inspection.kernel_sets):
            exact = variant.counts[phase]
            assert exact is not None
            assert +counts.launches == +exact.launches
            assert +counts.bytes == +exact.bytes
            assert (+counts.calls, +counts.messages) == (+exact.calls, +exact.messages)
            assert counts.waits == exact.waits
            assert counts.peak == pytest.approx(exact.peak, rel=0.02)  # as in test_inspection.py
