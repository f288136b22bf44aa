"""Losses whose logits are scaled and capped: in float32 no cast is needed, and the caller's tensor stays as it was."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels_ext_npu.selftest import comparing
from kernels_ext_npu.selftest.cases import Function, drawn

OPTIONS = {"softcap": 3.0, "logit_scale": 0.5}
LABELS = torch.arange(12)


def compute_log_probs(hidden_states: Tensor, weight: Tensor) -> Tensor:
    return F.log_softmax(3.0 * torch.tanh(hidden_states @ weight.mT * 0.5 / 3.0), -1)


def reverse_kl(hidden_states: Tensor, weight: Tensor) -> Tensor:
    """Of a student and a teacher that has the same head, and the hidden states in the other order."""
    log_probs, teacher = (
        compute_log_probs(hidden_states, weight),
        compute_log_probs(hidden_states.flip(0), weight).detach(),
    )
    return (log_probs.exp() * (log_probs - teacher)).sum(-1)


def linear_losses(hidden_states: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    log_probs = compute_log_probs(hidden_states, weight)
    return log_probs.gather(-1, LABELS[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


CALLS = {
    "linear_log_probs": (lambda f, h, w: f(h, w, LABELS.npu(), **OPTIONS), lambda h, w: linear_losses(h, w)[0]),
    "linear_log_probs_and_entropy": (lambda f, h, w: f(h, w, LABELS.npu(), **OPTIONS), linear_losses),
    "linear_generalized_jsd": (
        lambda f, h, w: f(h, w, h.flip(0), w, beta=1, reduction="none", teacher_softcap=3.0, **OPTIONS),
        reverse_kl,
    ),
}


@pytest.mark.parametrize("dtype", comparing.DTYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_scaled_and_capped_logits(kernels, name: str, dtype: torch.dtype) -> None:
    function = Function("CrossEntropy", name, *CALLS[name], drawn((12, 32), (40, 32)))
    assert function.compare(kernels["CrossEntropy"], dtype).largest <= comparing.TOLERANCE[dtype]


def test_logits_of_the_caller_stay_as_they_were(kernels) -> None:
    x = torch.randn(12, 40, generator=torch.Generator().manual_seed(0))
    logits = x.npu()
    loss = kernels["CrossEntropy"].cross_entropy(logits, LABELS.npu(), reduction="none", **OPTIONS)
    exact = F.cross_entropy(3.0 * torch.tanh(x.double() * 0.5 / 3.0), LABELS, reduction="none")
    assert torch.equal(logits.cpu(), x)
    assert (loss.cpu() - exact).norm() <= comparing.TOLERANCE[torch.float32] * exact.norm()
