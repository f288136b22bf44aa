"""Gates as models have them: here, and in the formula of torch_npu's own operator, which the card says is not used."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernels_ext_npu.selftest.functions.linear_attention import delta_rule
from tests.support.delta_rule_inputs import draw

CHUNK = 64
ONE_STEP = -100.0 * torch.nn.functional.one_hot(torch.tensor(30), CHUNK).float()


def decays_of_npu_chunk_gated_delta_rule(g: Tensor) -> Tensor:
    """What one token of a chunk keeps of another, ``[C, C]``, as stage 1 of CANN's kernel computes it.

    GCumExpCompute and GammaCompute of ops-transformer's chunk_gated_delta_rule_stage1.h: exp of the sums of gates, each
    divided by each, and the mask as a factor behind that; in float32, of which a vector core takes what is smaller than
    the smallest normal number as 0.
    """
    sums = g.float().cumsum(-1).exp()
    sums = torch.where(sums < torch.finfo(torch.float32).tiny, 0.0, sums)
    return sums.unsqueeze(-1) / sums.unsqueeze(-2) * torch.ones(CHUNK, CHUNK).tril()


@pytest.mark.parametrize(
    ("g", "is_finite"),
    [
        (torch.full((CHUNK,), -1.0), True),  # the lowest gate that its documentation allows
        (torch.full((CHUNK,), -1.36), True),
        (torch.full((CHUNK,), -1.4), False),
        (ONE_STEP, False),
        (torch.full((CHUNK,), -316.0), False),
    ],
    ids=["-1", "-1.36", "-1.4", "one of -100", "-316"],
)
def test_gates_that_are_nan_in_the_formula_of_torch_npus_operator_are_right_here(
    kernel: ModuleType, g: Tensor, is_finite: bool
) -> None:
    theirs = decays_of_npu_chunk_gated_delta_rule(g)
    assert bool(theirs.isfinite().all()) is is_finite
    sums = g.double().cumsum(-1)
    exact = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).exp().tril()
    if is_finite:  # so the formula is theirs: what it computes is the decay where it can
        torch.testing.assert_close(theirs.double(), exact, rtol=1e-4, atol=0)
    q, k, v, _, beta = draw(0, (1, CHUNK, 1, 1, 8, 8), False)
    tensors = q, k, v, g.view(1, CHUNK, 1), beta
    found = kernel.chunk_gated_delta_rule(
        *(x.npu() for x in tensors), use_qk_l2norm_in_kernel=True, output_final_state=True
    )
    for ours, wanted in zip(found, delta_rule(*(x.double() for x in tensors))):
        assert (ours.cpu().double() - wanted).norm() <= 100 * 2.0**-24 * wanted.norm()
