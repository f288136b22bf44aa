"""Acts on the head and the loss: what they are, which labels a call is given, and when somebody looks at logits."""

from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.trainer_pt_utils import LabelSmoother

from tests.support.programs import variants
from tests.support.programs.acts.hooks import drawn
from tests.support.programs.acts.training import can_train, trained
from tests.support.programs.registry import act, acts
from tests.support.programs.side import Side

LEFT_OUT = -100


def gradient(side: Side, of: Tensor, **options: Any) -> Tensor:
    """Return the gradients of everything that is trained, in one tensor: small ones count as small."""
    found = torch.autograd.grad(of, trained(side), allow_unused=True, **options)
    return torch.cat([grad.detach().cpu().double().flatten() for grad in found if grad is not None])


def show_loss(side: Side, loss: Tensor) -> None:
    """Show a loss, and its gradients where something is trained."""
    side.show(loss)
    if loss.requires_grad:
        side.show_gradient(gradient(side, loss))


def labels(side: Side, choice: Random) -> Tensor:
    """Choose labels: some tokens are left out."""
    made = side.inputs["labels"].clone()
    made.view(-1)[choice.sample(range(made.numel()), 3)] = LEFT_OUT
    return made


def own_loss(logits: Tensor, labels: Tensor, vocab_size: int, **options: Any) -> Tensor:
    """Compute a loss of logits that looks at them."""
    rows = logits[:, :-1].reshape(-1, vocab_size)
    return F.cross_entropy(rows, labels[:, 1:].reshape(-1)) + 0.125 * rows.float().logsumexp(-1).square().mean()


def smoothed_loss(logits: Tensor, labels: Tensor, vocab_size: int, **options: Any) -> Tensor:
    """Compute a loss of logits by cross entropy with other options."""
    rows, words = logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1)
    return F.cross_entropy(rows.float() * 0.5, words, label_smoothing=0.25, reduction="sum")


def _head(side: Side) -> Any:
    return side.pretrained.get_output_embeddings()


@act()
def replace_the_head(side: Side, choice: Random) -> None:
    rows, width = _head(side).weight.shape
    new = nn.Linear(width, rows, bias=choice.random() < 0.5, device=side.device, dtype=_head(side).weight.dtype)
    side.pretrained.set_output_embeddings(drawn(new, 7))


class OwnHead(nn.Linear):
    """A head that does more than multiply."""

    def forward(self, input: Tensor) -> Tensor:
        return 1.25 * super().forward(input)


@act()
def give_the_head_a_class(side: Side, choice: Random) -> None:
    if type(head := _head(side)) is nn.Linear:
        head.__class__ = OwnHead


@act()
def tie_the_head(side: Side, choice: Random) -> None:
    embedding = side.pretrained.get_input_embeddings().weight
    if _head(side).weight.shape == embedding.shape:
        _head(side).weight = embedding


@act()
def untie_the_head(side: Side, choice: Random) -> None:
    head = _head(side)
    head.weight = nn.Parameter(head.weight.detach() * 1.125, requires_grad=head.weight.requires_grad)


@act()
def call_without_labels(side: Side, choice: Random) -> None:
    logits = side.run(labels=None).logits
    side.show(logits)
    if logits.requires_grad:
        side.show_gradient(gradient(side, logits.float().square().mean()))


@act()
def call_with_some_labels(side: Side, choice: Random) -> None:
    """Perhaps with the number of them in all processes."""
    number = choice.choice([None, 3, torch.tensor(7, device=side.device)])
    options = {} if number is None else {"num_items_in_batch": number}
    show_loss(side, side.run(labels=labels(side, choice), **options).loss)


def _show_both(side: Side, loss: Tensor, logits: Tensor, *_: Any) -> None:
    side.show(loss)
    side.show(logits)


acts(
    replace_the_loss=lambda side, choice: setattr(
        side.pretrained, "loss_function", choice.choice([own_loss, smoothed_loss])
    ),
    call_for_a_tuple=lambda side, choice: _show_both(side, *side.run(return_dict=False)),
    call_for_the_last_logits=lambda side, choice: _show_both(
        side, *side.run(labels=labels(side, choice)[:, -3:], logits_to_keep=3, return_dict=False)
    ),
)


@act(can_train)
def look_at_logits_before_the_backward(side: Side, choice: Random) -> None:
    """They get a gradient of their own."""
    result = side.run()
    whole = result.loss + 0.25 * result.logits.float().square().mean()
    if whole.requires_grad:
        side.show_gradient(gradient(side, whole))


@act(can_train)
def change_logits_before_the_backward(side: Side, choice: Random) -> None:
    """In place, as masks of words do; a loss may keep a view of them, and torch says so."""
    result = side.run()
    with torch.no_grad():
        result.logits[..., 0] = -1.0
    side.show(result.logits)
    if result.loss.requires_grad:
        side.show_gradient(gradient(side, result.loss))


@act(can_train)
def differentiate_the_loss_twice(side: Side, choice: Random) -> None:
    result = side.run()
    if result.loss.requires_grad:
        side.show_gradient(gradient(side, result.loss, retain_graph=True))
        side.show_gradient(gradient(side, result.loss))


@act(can_train)
def smooth_labels(side: Side, choice: Random) -> None:
    """As `Trainer` does with ``label_smoothing_factor``."""
    show_loss(side, LabelSmoother(0.125)(side.run(), labels(side, choice), shift_labels=True))


@act()
def make_the_vocabulary_smaller(side: Side, choice: Random) -> None:
    words = side.pretrained.get_input_embeddings().weight.shape[0]
    side.pretrained.resize_token_embeddings(max(words - 1, variants.PICTURE + 1))
