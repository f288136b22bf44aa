"""Hyper-connections against transformers' own classes and float64: streams that become one, and how they are mixed."""

from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek

import kernels_ext_npu
from kernels_ext_npu.selftest import comparing
from tests.support import npu_counts

HIDDEN, STREAMS, EPS = 32, 4, 1e-6
CONFIG = SimpleNamespace(
    hidden_size=HIDDEN, hc_mult=STREAMS, hc_eps=EPS, hc_sinkhorn_iters=20, rms_norm_eps=1e-5, hc_magnitude=1.5
)


def made() -> deepseek.DeepseekV4HyperConnection:
    torch.manual_seed(0)
    module = deepseek.DeepseekV4HyperConnection(CONFIG)
    for parameter in module.parameters():
        nn.init.normal_(parameter, 0, 1 if parameter.dim() == 1 else 0.1)
    return module


def given() -> tuple:
    module = made().requires_grad_(False)
    return torch.randn(2, 9, STREAMS, HIDDEN), module.fn, module.base, module.scale, 1e-5, EPS, 20


@pytest.mark.parametrize(("rounds", "eps"), [(1, EPS), (2, EPS), (20, EPS), (20, 1e-2)])
def test_steep_weights_are_normalised_as_often(kernel: ModuleType, rounds: int, eps: float) -> None:
    """Rounds that are far from done, and sums of the size of eps; logits of up to 50 are rounded to 4e-6."""
    torch.manual_seed(rounds)
    streams, weight = torch.randn(300, 4, 2), torch.randn(24, 8) * 8
    terms = streams, weight, torch.zeros(24), torch.ones(3)
    found = kernel.hyper_connection(*(tensor.npu() for tensor in terms), 1e-6, eps, rounds)[1]
    module = deepseek.DeepseekV4HyperConnection(SimpleNamespace(**vars(CONFIG) | {"hidden_size": 2}))
    module.hc_sinkhorn_iters, module.hc_eps, module.input_norm.eps = rounds, eps, 1e-6
    module.load_state_dict(dict(zip(("fn", "base", "scale"), terms[1:])))
    wanted = comparing.exact(module.double(), (streams.unsqueeze(0),)).outputs[1][0]
    assert (wanted.sum(-1) - 1).abs().max() > 1e-2
    assert (found.cpu() - wanted).norm() <= 3e-6 * wanted.norm()


def test_a_round_is_two_launches_and_keeps_nothing(kernel: ModuleType) -> None:
    """62 and 199 where transformers has 139 and 457; what is kept does not grow with the rounds."""
    *tensors, norm_eps, eps, _ = given()
    tensors = [tensor.npu().requires_grad_() for tensor in tensors]
    kept = []

    def keep(tensor: Tensor) -> Tensor:
        kept[-1] += tensor.numel()
        return tensor

    def launches(rounds: int) -> tuple[int, int]:
        npu_counts.reset()
        kept.append(0)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            outputs = kernel.hyper_connection(*tensors, norm_eps, eps, rounds)
        calls = npu_counts.read()
        assert calls["stream_syncs"] == 0
        forward = sum(calls.values())
        torch.autograd.grad(outputs, tensors, [torch.ones_like(y) for y in outputs])
        return forward, sum(npu_counts.read().values())

    few, more = launches(10), launches(20)
    assert more[0] - few[0] == 20
    assert more[1] - few[1] == 20 + 40
    assert kept[0] == kept[1]
    assert more[0] <= 62


def test_what_does_not_fit_is_refused(kernel: ModuleType) -> None:
    x, weight, base, scale, *terms = given()
    with pytest.raises(ValueError, match="4 streams of 32 values take a weight"):
        kernel.hyper_connection(x, weight[1:], base, scale, *terms)
    with pytest.raises(TypeError, match="base must be floating point"):
        kernel.hyper_connection(x, weight, base.long(), scale, *terms)
    for eps, rounds in ((0.0, 20), (1e-6, 0)):
        with pytest.raises(ValueError, match="eps must be positive and rounds at least 1"):
            kernel.hyper_connection(x, weight, base, scale, 1e-5, eps, rounds)


def test_a_module_without_logarithms_of_its_weights_is_left_alone(registered) -> None:
    module = made()
    module.hc_eps = 0.0
    model = nn.ModuleDict({"block": module, "other": nn.Linear(1, 1)}).to("npu")
    rows = kernels_ext_npu.report(kernels_ext_npu.kernelize(model))
    (row,) = [row for row in rows if row.kind == "hyper-connections"]
    assert not row.swapped
    assert "hc_eps is 0.0" in row.reason
