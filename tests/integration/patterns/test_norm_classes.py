"""Every norm of transformers on the software device: the values and gradients of its own forward."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.models.xlstm.modeling_xlstm import xLSTMRMSNorm

import kernels_ext_npu
import softnpu
from kernels_ext_npu.catalogue import NORMS
from kernels_ext_npu.matching.classification import COUNTED, UNSUPPORTED
from tests.support.norm_modules import inputs, instance
from tests.support.swapped import assert_agree, moved, results, swapped
from tests.support.transformers_files import classes, differing

pytestmark = pytest.mark.usefixtures("registered")
TESTS = Path(__file__).resolve().parents[2]
REFUSED = UNSUPPORTED[NORMS.name].keys()


def test_the_counted_release_is_the_pinned_one() -> None:
    assert f"transformers=={COUNTED};" in (TESTS.parent / "requirements.txt").read_text()


# the same formula in float32, sums in another order; narrow results and gradients are rounded once on either side
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 2**-7}


@pytest.mark.parametrize("of_weight", TOLERANCES)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_results_and_gradients_are_the_originals(subtests, dtype, of_weight) -> None:
    """How near they are to float64 is asked of the layers, in tests/variants."""
    originals = [instance(c).to(of_weight) for c in differing(c for c in classes(NORMS) if c.__name__ not in REFUSED)]
    for original, device in zip(originals, swapped(*originals)):
        with subtests.test(type(original).__name__):
            arguments = inputs(original, dtype)
            softnpu.reset_counters()
            found = results(device, *moved(arguments))
            counters = softnpu.counters()
            assert counters["npu_rms_norm"] == counters["npu_rms_norm_backward"] == 1
            assert counters["stream_syncs"] == 0
            assert_agree(found, results(original, *arguments), max(TOLERANCES[dtype], TOLERANCES[of_weight]))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"use_bias": True}, "it adds a bias"),
        ({"use_weight": False}, "it has no weight"),
        ({"force_float32_reductions": False}, "it squares in the dtype of its input, the kernel in float32"),
    ],
)
def test_the_norm_of_xlstm_is_kept_where_it_does_more(values, reason) -> None:
    norm = xLSTMRMSNorm(32, **values)
    model = nn.ModuleDict({"norm": norm, "o": nn.Linear(1, 1)}).npu()
    (row,) = kernels_ext_npu.report(kernels_ext_npu.kernelize(model))
    assert (row.swapped, row.reason) == (False, reason)
