"""Sums of exponentials that come with a head's logits, from one launch: against older releases, and beyond float16."""

from importlib import import_module
from types import ModuleType

import pytest
import torch
from torch.nn import functional as F

from tests.cross_entropy.losses import draw


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"label_smoothing": 0.1}, {"logit_scale": 2.0}])
@pytest.mark.parametrize("is_kept", [True, False])
def test_sums_come_with_the_logits_where_no_option_changes_them(
    kernel: ModuleType, npu_counters, monkeypatch, options, is_kept
) -> None:
    """No launch reads them but softmax; on older releases of CANN numbers are the same.

    But for a sum of float32 in another order: 2^-20 of the loss, which rounds a gradient in bfloat16 elsewhere at most.
    """
    drawn, fused = draw(64, 300, 32, seed=2), "npu_fused_linear_online_max_sum"
    monkeypatch.setattr(import_module(f"{kernel.__name__}.ops.chunking"), "LOGITS_BUDGET", 2**30 if is_kept else 0)
    found = []
    for cann in ((9, 1), (9, 0)):
        monkeypatch.setattr(import_module(f"{kernel.__name__}.ops.head_logits"), "CANN", cann)
        leaves = [t.bfloat16().npu().requires_grad_() for t in drawn[:2]]
        before = npu_counters().get(fused, 0)
        rows = kernel.linear_cross_entropy(*leaves, drawn.labels.npu(), reduction="none", **options)
        assert npu_counters().get(fused, 0) - before == (2 if cann == (9, 1) and not options else 0)
        rows.sum().backward()
        found.append([t.detach().cpu().double() for t in (rows, *(leaf.grad for leaf in leaves))])
    for tensor, other, eps in zip(*found, (2.0**-20, 2.0**-8, 2.0**-8)):
        assert (tensor - other).abs().max() <= eps * other.abs().max()


@pytest.mark.parametrize("is_kept", [True, False])
def test_logits_beyond_float16_are_words_without_a_probability(kernel: ModuleType, monkeypatch, is_kept) -> None:
    """Half of the words have -inf: the loss is that of the others, and their weights have no gradient.

    Logits of float32 sums, of integers, have no rounding; a loss has that of a few float32: 2^-20.
    """
    monkeypatch.setattr(import_module(f"{kernel.__name__}.ops.chunking"), "LOGITS_BUDGET", 2**30 if is_kept else 0)
    weight = torch.randint(-4, 5, (1024, 32), generator=torch.Generator().manual_seed(0)).half()
    weight[:512] = -1000
    hidden = torch.full((9, 32), 4.0).half().npu().requires_grad_()
    leaf = weight.npu().requires_grad_()
    labels = torch.arange(512, 521)
    rows = kernel.linear_cross_entropy(hidden, leaf, labels.npu(), reduction="none")
    rows.sum().backward()
    truth = F.cross_entropy(4 * weight[512:].double().sum(-1).expand(9, -1), labels - 512, reduction="none")
    assert (rows.detach().cpu() - truth).abs().max() <= 2**-20 * truth.abs().max()
    assert hidden.grad.isfinite().all()
    assert not leaf.grad[:512].any()
