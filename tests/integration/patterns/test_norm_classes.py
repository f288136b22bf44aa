"""Every norm of transformers on the software device: the values and gradients of its own forward."""

import copy
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers.models.xlstm.modeling_xlstm import xLSTMRMSNorm

import kernels_ext_npu
import softnpu
from kernels_ext_npu.catalogue import NORMS
from kernels_ext_npu.matching.classification import COUNTED, UNSUPPORTED
from kernels_ext_npu.matching.lookup import find_pattern
from tests.support.counted import counted
from tests.support.norm_modules import exact, inputs, instance
from tests.support.transformers_files import classes, differing

pytestmark = pytest.mark.usefixtures("registered")
TESTS = Path(__file__).resolve().parents[2]
REFUSED = UNSUPPORTED[NORMS.name].keys()


def swapped(module: nn.Module) -> nn.Module:
    """A copy on the device, with its kernel."""
    model = nn.ModuleDict({"norm": copy.deepcopy(module), "other": nn.Linear(1, 1)}).to("npu")
    (row,) = kernels_ext_npu.report(kernels_ext_npu.kernelize(model))
    assert row.swapped, row.reason
    return model["norm"]


def results(module: nn.Module, arguments: list[Tensor], call=None) -> list[Tensor | None]:
    """The result, and the gradients of arguments and weights."""
    leaves = [t.detach().requires_grad_() for t in arguments]
    y = (call or module)(*leaves)
    module.zero_grad()
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y))
    return [y.detach(), *(leaf.grad for leaf in leaves), *(p.grad for p in module.parameters())]


def test_the_counted_release_is_the_pinned_one() -> None:
    assert f"transformers=={COUNTED};" in (TESTS.parent / "requirements.txt").read_text()


@counted
def test_every_norm_class_is_served_or_refused_with_a_reason() -> None:
    refused = {cls.__name__ for cls in classes(NORMS) if find_pattern(cls) is None}
    assert refused == REFUSED


@counted
def test_all_that_transformers_decorates_is_served() -> None:
    decorated = [cls for cls in classes(NORMS) if "kernel_layer_name" in vars(cls)]
    found = Counter(cls.kernel_layer_name for cls in decorated)
    assert found == {"RMSNorm": 137, "RMSNormZeroCentered": 2, "RMSNormGated": 8}
    assert all(find_pattern(cls) for cls in decorated)


@counted
def test_the_undecorated_families_are_served() -> None:
    found = Counter(
        find_pattern(c).module.__name__
        for c in classes(NORMS)
        if find_pattern(c) and "kernel_layer_name" not in vars(c)
    )
    assert found == {
        "LlamaRMSNorm": 11,
        "GemmaRMSNorm": 11,
        "T5LayerNorm": 10,
        "Gemma4RMSNorm": 8,
        "NanoChatRMSNorm": 5,
        "MambaRMSNormGated": 3,
        "DeepseekV4UnweightedRMSNorm": 2,
        "MoshiRMSNorm": 2,
        "CpmAntLayerNorm": 1,
        "HeliumRMSNorm": 1,
        "Llama4TextRMSNorm": 1,
        "MuseSparkRMSNorm": 1,
        "Qwen4ExpTextRMSNorm": 1,
        "TimestepRMSNorm": 1,
        "XLSTMRMSNorm": 1,
    }


def test_float32_results_and_gradients_are_the_originals(subtests) -> None:
    """To 1e-6 of the norm: the same formula in float32, sums in another order."""
    for cls in differing(cls for cls in classes(NORMS) if cls.__name__ not in REFUSED):
        with subtests.test(cls.__name__):
            original = instance(cls)
            arguments = inputs(original, torch.float32)
            device = swapped(original)
            moved = [t.to("npu") for t in arguments]
            softnpu.reset_counters()
            found = results(device, moved)
            counters = softnpu.counters()
            assert counters["npu_rms_norm"] == counters["npu_rms_norm_backward"] == 1
            assert counters["stream_syncs"] == 0
            for a, b in zip(found, results(original, arguments)):
                assert (a is None) == (b is None)
                if b is not None:
                    assert a.dtype == b.dtype
                    assert (a.cpu() - b).norm() <= 1e-6 * b.norm()


@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_bfloat16_is_no_further_from_float64_than_the_original(subtests, dtypes) -> None:
    """In root mean square, with the dtype of the original. 1e-3 for sums in float32, whose order differs."""
    for cls in differing(cls for cls in classes(NORMS) if cls.__name__ not in REFUSED):
        with subtests.test(cls.__name__):
            original = instance(cls).to(dtypes[1])
            arguments = inputs(original, dtypes[0])
            own = results(original, arguments)
            found = results(swapped(original), [t.to("npu") for t in arguments])
            truth = copy.deepcopy(original).double()
            expected = results(truth, [t.double() for t in arguments], lambda *a, truth=truth: exact(truth, *a))
            for a, b, c in zip(found, own, expected):
                assert (a is None) == (b is None)
                if b is not None:
                    assert a.dtype == b.dtype
                    error, limit = (a.cpu().double() - c).norm(), (b.double() - c).norm()
                    assert error <= limit * (1 + 1e-3) + 1e-6 * c.norm()


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
