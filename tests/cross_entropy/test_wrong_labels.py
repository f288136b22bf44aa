"""Labels that are no words: NaN for their rows and gradients for all others, or an error that names them."""

from collections.abc import Callable
from functools import partial
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.cross_entropy.losses import draw, leaves
from tests.support import npu_counts

ROWS, WORDS, HIDDEN = 7, 9, 4
WRONG = {2: WORDS, 4: -1, 5: 2**40}  # row -> label
OPTIONS = [
    {},
    {"pieces": 2},
    {"label_smoothing": 0.1, "z_loss": 0.01, "logit_scale": 0.5, "softcap": 4.0},
]


def logits_loss(kernel: ModuleType, hidden: Tensor, weight: Tensor, labels: Tensor, **options) -> Tensor:
    options.pop("pieces", None)
    return kernel.cross_entropy(F.linear(hidden, weight), labels, **options)


def linear_loss(kernel: ModuleType, *tensors: Tensor, **options) -> Tensor:
    return kernel.linear_cross_entropy(*tensors, **options)


def shard_loss(kernel: ModuleType, *tensors: Tensor, **options) -> Tensor:
    """With a shard that is the whole vocabulary."""
    shard = kernel.Shard(0, WORDS, lambda tensor, _: tensor)
    return kernel.linear_cross_entropy(*tensors, shard=shard, **options)


def log_probs(function: str, kernel: ModuleType, *tensors: Tensor, reduction: str = "none", **options) -> Tensor:
    options = {name: value for name, value in options.items() if name in ("pieces", "softcap", "logit_scale")}
    found = getattr(kernel, function)(*tensors, **options)
    rows = found[0] if isinstance(found, tuple) else found
    return rows if reduction == "none" else rows.sum()


LOSSES: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": logits_loss,
    "linear_cross_entropy": linear_loss,
    "linear_cross_entropy with a shard": shard_loss,
    "linear_log_probs": partial(log_probs, "linear_log_probs"),
    "linear_log_probs_and_entropy": partial(log_probs, "linear_log_probs_and_entropy"),
}
each_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


def right() -> Tensor:
    return draw(ROWS, WORDS, HIDDEN).labels.clamp(min=0)


def wrong() -> Tensor:
    labels = right()
    for row, label in WRONG.items():
        labels[row] = label
    return labels


def head() -> list[Tensor]:
    return leaves(draw(ROWS, WORDS, HIDDEN)[:2], torch.float32, "npu")


@each_loss
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_other_rows_keep_their_losses_and_gradients(kernel: ModuleType, loss, options: dict, reduction: str) -> None:
    """They are those of labels that do not count, which torch leaves out."""
    found, expected = head(), head()
    ignored = wrong()
    ignored[[*WRONG]] = -100
    ours = loss(kernel, *found, wrong().npu(), reduction=reduction, **options)
    own = loss(kernel, *expected, ignored.npu(), reduction=reduction, **options)
    if reduction == "none":
        assert [row for row, value in enumerate(ours.tolist()) if value != value] == [*WRONG]
        assert ours.nan_to_num().equal(own)
    else:
        assert ours.isnan()
    ours.sum().backward()
    own.sum().backward()
    for a, b in zip(found, expected, strict=True):
        assert a.grad.equal(b.grad)


@each_loss
def test_it_is_an_error_while_anomalies_are_detected(kernel: ModuleType, loss) -> None:
    message = f"the loss is nan: label {WORDS} of row 2 is none of the {WORDS} words.* in 3 of {ROWS} rows"
    with torch.autograd.detect_anomaly(), pytest.raises(IndexError, match=message):
        loss(kernel, *head(), wrong().npu())
    with torch.autograd.detect_anomaly():
        loss(kernel, *head(), right().npu(), reduction="sum").backward()


@each_loss
def test_on_the_host_it_is_an_error_as_in_torch(kernel: ModuleType, loss) -> None:
    hidden, weight = (tensor.detach().cpu() for tensor in head())
    with pytest.raises(IndexError, match="out of bounds"):
        F.cross_entropy(F.linear(hidden, weight), wrong())
    with pytest.raises(IndexError, match=f"label {WORDS} of row 2"):
        loss(kernel, hidden, weight, wrong())


@each_loss
def test_nothing_waits_to_find_it(kernel: ModuleType, loss) -> None:
    tensors, labels = head(), wrong().npu()
    before = npu_counts.read().get("stream_syncs", 0)
    loss(kernel, *tensors, labels, reduction="sum").backward()
    assert npu_counts.read().get("stream_syncs", 0) == before
