"""Acts that call a model: in a mode, for a loss of a head, and for outputs that are kept."""

import copy
import gc
from contextlib import nullcontext
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.programs import variants
from tests.support.programs.acts.kernels import stays_off_the_hub
from tests.support.programs.acts.modules import drawn
from tests.support.programs.acts.training import can_train, trained
from tests.support.programs.registry import act, acts
from tests.support.programs.side import Kept, Side

acts(
    stays_off_the_hub,
    train=lambda side, choice: side.model.train(),
    evaluate=lambda side, choice: side.model.eval(),
)
acts(
    switch_checkpointing_on=lambda side, choice: side.pretrained.gradient_checkpointing_enable(
        {"use_reentrant": False}
    ),
    switch_checkpointing_off=lambda side, choice: side.pretrained.gradient_checkpointing_disable(),
)


@act()
def train_a_part(side: Side, choice: Random) -> None:
    _, module = choice.choice(side.named("DecoderLayer", "MLP", "Norm", "Layer", "Block", "Mlp", "DeltaNet"))
    module.train(choice.random() < 0.5)


# torch.no_grad() and the like decorate a function, too
acts(
    call_without_gradients=lambda side, choice: side.show(
        choice.choice([torch.no_grad, torch.inference_mode])()(side.run)().logits
    ),
    call_with_autocast=lambda side, choice: side.show(
        torch.autocast(side.device.type, dtype=torch.bfloat16)(side.run)().logits, torch.bfloat16
    ),
    # in the place of ids, as adapters of prompts do
    call_with_embeddings=lambda side, choice: side.show(
        side.run_text(
            input_ids=None, inputs_embeds=1.125 * side.pretrained.get_input_embeddings()(side.inputs["input_ids"])
        ).logits
    ),
)


@act()
def call_the_model_below_the_head(side: Side, choice: Random) -> None:
    given = {key: value for key, value in side.inputs.items() if key != "labels"}
    with torch.no_grad():
        side.show(side.pretrained.base_model(**given).last_hidden_state)


@act()
def call_with_other_weights(side: Side, choice: Random) -> None:
    """torch.func.functional_call with weights that the model does not have."""
    weights = {name: p.detach() * 1.125 for name, p in side.parameters()}
    side.show(torch.func.functional_call(side.model, weights, (), side.inputs).logits)


@act()
def generate(side: Side, choice: Random) -> None:
    ids = variants.IDS.to(side.device)
    found = side.model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    side.show(found.logits[0])


# ---- the head and the loss: what they are, which labels there are, and when somebody looks at logits -----------------
LEFT_OUT = -100


def show_loss(side: Side, loss: Tensor) -> None:
    """Show a loss, and the gradients of everything that is trained, in one tensor: small ones count as small."""
    side.show(loss)
    if loss.requires_grad:
        found = torch.autograd.grad(loss, trained(side), allow_unused=True)
        side.show_gradient(torch.cat([grad.cpu().double().flatten() for grad in found if grad is not None]))


def labels(side: Side, choice: Random) -> Tensor:
    """Choose labels: some tokens are left out."""
    made = side.inputs["labels"].clone()
    made.view(-1)[choice.sample(range(made.numel()), 3)] = LEFT_OUT
    return made


def own_loss(logits: Tensor, labels: Tensor, vocab_size: int, **options: Any) -> Tensor:
    """Compute a loss of logits that looks at them, of rows with a label: others may see no key."""
    rows, words = logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1)
    return F.cross_entropy(rows, words) + 0.125 * rows[words != LEFT_OUT].float().logsumexp(-1).square().mean()


def smoothed_loss(logits: Tensor, labels: Tensor, vocab_size: int, **options: Any) -> Tensor:
    """Compute a loss of logits by cross entropy with other options."""
    rows, words = logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1)
    return F.cross_entropy(rows.float() * 0.5, words, label_smoothing=0.25, reduction="sum")


class OwnHead(nn.Linear):
    """A head that does more than multiply."""

    def forward(self, input: Tensor) -> Tensor:
        return 1.25 * super().forward(input)


@act()
def change_the_head(side: Side, choice: Random) -> None:
    """Replace it, give it a class that does more, or tie or untie its weight."""
    head, embedding = side.pretrained.get_output_embeddings(), side.pretrained.get_input_embeddings().weight
    how, (rows, width) = choice.choice(["replaced", "with a bias", "of a class", "tied", "untied"]), head.weight.shape
    if how in ("replaced", "with a bias"):
        new = nn.Linear(width, rows, bias=how == "with a bias", device=side.device, dtype=head.weight.dtype)
        side.pretrained.set_output_embeddings(drawn(new, 7))
    elif how == "of a class" and type(head) is nn.Linear:
        head.__class__ = OwnHead
    elif how == "tied" and head.weight.shape == embedding.shape:
        head.weight = embedding
    else:
        head.weight = nn.Parameter(head.weight.detach() * 1.125, requires_grad=head.weight.requires_grad)


@act()
def call_without_labels(side: Side, choice: Random) -> None:
    logits = side.run(labels=None).logits
    side.show(logits)
    show_loss(side, logits.float().square().mean())


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
    lambda side: side.variant == "pictures",
    call_without_a_picture=lambda side, choice: _show_both(side, *side.run_text(return_dict=False)),
)
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
def use_logits_before_the_backward(side: Side, choice: Random) -> None:
    """For a gradient of their own, or in place, as masks of words do: a loss may keep a view, and torch says so."""
    result = side.run()
    if choice.random() < 0.5:
        return show_loss(side, result.loss + 0.25 * result.logits.float().square().mean())
    with torch.no_grad():
        result.logits[..., 0] = -1.0
    side.show(result.logits)
    return show_loss(side, result.loss)


@act()
def make_the_vocabulary_smaller(side: Side, choice: Random) -> None:
    words = side.pretrained.get_input_embeddings().weight.shape[0]
    side.pretrained.resize_token_embeddings(max(words - 1, variants.PICTURE + 1))


# ---- outputs that the user keeps: whatever has happened since, they are what the forward computed --------------------
@act(lambda side: not side.has_steps)
def keep_outputs(side: Side, choice: Random) -> None:
    """Of a call with labels; logits are those of one without. The loss runs backward now, perhaps later, or never."""
    with choice.choice([torch.no_grad, torch.inference_mode, nullcontext, nullcontext])():
        logits = side.run(labels=None).logits.detach().clone()
        outputs = side.run(output_hidden_states=True)
    states = outputs.get("hidden_states") or outputs.get("decoder_hidden_states") or ()
    side.kept.append(Kept(outputs, logits, [state.detach().clone() for state in states]))
    if choice.random() < 0.5 and outputs.loss.requires_grad:
        outputs.loss.backward()
        side.model.zero_grad()


@act(lambda side: side.kept)
def look_at_kept_outputs(side: Side, choice: Random) -> None:
    """The newest, and often all of them."""
    for outputs, logits, states in [side.kept.pop()] if choice.random() < 0.5 else side.kept:
        limit = 2.0**-16 if logits.dtype == torch.float32 else 2.0**-7  # sums in another order
        assert (outputs.logits.detach() - logits).norm() <= limit * logits.norm(), "logits that were kept"
        for found, expected in zip(outputs.get("hidden_states") or outputs.get("decoder_hidden_states") or (), states):
            assert torch.equal(found, expected), "hidden states that were kept"


@act(lambda side: side.kept)
def go_backward_from_kept_outputs(side: Side, choice: Random) -> None:
    """From the newest, or all at once, where no weight was changed since: torch refuses it for both then."""
    kept = side.kept[-1:] if choice.random() < 0.5 else side.kept
    losses = [each.outputs.loss for each in kept if each.outputs.loss.requires_grad]
    if losses:
        sum(losses).backward()
        side.model.zero_grad()


@act(lambda side: side.kept)
def keep_only_the_outputs(side: Side, choice: Random) -> None:
    """The model that has computed them goes away; a copy goes on."""
    side.model = copy.deepcopy(side.model)
    gc.collect()
