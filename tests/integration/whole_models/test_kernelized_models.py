"""Whole models with kernels: every architecture of the zoo still gives what the CPU gives without them."""

import pytest

import kernels_ext_npu
from tests.support import zoo
from tests.support.agreement import assert_agrees


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
# padded caches of hybrids
@pytest.mark.filterwarnings("ignore:npu_fusion_attention_v3. atten_mask leaves a row nothing")
def test_logits_gradients_and_tokens_are_the_originals(registered, name: str) -> None:
    model = kernels_ext_npu.kernelize(zoo.build(name).to("npu"))
    rows = list(kernels_ext_npu.report(model))
    assert not [row for row in rows if not (row.swapped or row.reason)]
    assert [row for row in rows if row.swapped]
    assert_agrees(name, model)
    assert not [row for row in kernels_ext_npu.report(kernels_ext_npu.restore(model)) if row.swapped]
