"""Every norm of transformers on the software device: the values and gradients of its own forward."""

from pathlib import Path

import pytest
import torch
from torch import nn

from kernels_ext_npu.catalogue import NORMS
from kernels_ext_npu.matching.classification import COUNTED, UNSUPPORTED
from kernels_ext_npu.matching.lookup import find_pattern
from tests.rmsnorm.norm_modules import inputs, instance
from tests.support import npu_counts
from tests.support.swapped import assert_agree, assert_no_further, in_float64, moved, results, swapped
from tests.support.transformers_files import classes, differing

pytestmark = pytest.mark.usefixtures("registered")
TESTS = Path(__file__).resolve().parents[1]
CAST_LAST = "RMSNormGatedCastLast"
REFUSED = UNSUPPORTED[NORMS.name].keys()


def test_the_counted_release_is_the_newest_one() -> None:
    assert f"NEXT := transformers=={COUNTED}\n" in (TESTS.parent / "Makefile").read_text()


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_and_gradients_are_the_originals(subtests, dtype, weight_dtype) -> None:
    """To 1e-6 of the norm in float32: sums in another order. In bfloat16 each is no further from float64, but for that.

    There 1e-3 for the order of sums in float32.
    """
    served = differing(cls for cls in classes(NORMS) if cls.__name__ not in REFUSED)
    originals = [instance(cls).to(weight_dtype) for cls in served]
    for original, device in zip(originals, swapped(*originals)):
        with subtests.test(type(original).__name__):
            arguments = inputs(original, dtype)
            npu_counts.reset()
            found = results(device, *moved(arguments))
            counters = npu_counts.read()
            assert counters["npu_rms_norm_backward"] == 1
            # a norm of 16 bits before SiLU of a gate is not kept, but computed again; one that is cast last has 32
            is_narrow = dtype is weight_dtype is torch.bfloat16 and find_pattern(type(original)).layers[0] != CAST_LAST
            again = counters.get("npu_swiglu_backward", 0) if is_narrow else 0
            assert counters["npu_rms_norm"] == 1 + again
            assert counters["stream_syncs"] == 0
            own = results(original, *arguments)
            if dtype is weight_dtype is torch.float32:
                assert_agree(found, own, 1e-6)
                continue
            for each in zip(found, own, in_float64(original, *arguments), strict=True):
                if each[2] is not None:
                    assert_no_further(*([tensor] for tensor in each), slack=1e-3, least=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("eps", [1e-6, None])
def test_torchs_own_norm_gives_what_it_gives(eps: float | None, dtype: torch.dtype) -> None:
    """To 1e-6 of the norm as above, or two roundings, of numbers so small that eps shows: that of 16 bits is 1e-3."""
    norm, x = nn.RMSNorm(32, eps=eps).to(dtype), 1e-3 * torch.randn(3, 2, 32)
    found, own = results(*swapped(norm), x.to("npu", dtype)), results(norm, x.to(dtype))
    assert_agree(found, own, max(1e-6, 2 * torch.finfo(dtype).eps))
