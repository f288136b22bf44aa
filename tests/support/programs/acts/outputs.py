"""Acts on outputs that the user keeps: whatever has happened since, they are what the forward computed."""

import copy
import gc
from contextlib import nullcontext
from random import Random

import torch

from tests.support.programs.registry import act
from tests.support.programs.side import Kept, Side


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


@act(lambda side: bool(side.kept))
def look_at_kept_outputs(side: Side, choice: Random) -> None:
    """The newest, and often all of them."""
    for outputs, logits, states in [side.kept.pop()] if choice.random() < 0.5 else side.kept:
        limit = 2.0**-16 if logits.dtype == torch.float32 else 2.0**-7  # sums in another order
        assert (outputs.logits.detach() - logits).norm() <= limit * logits.norm(), "logits that were kept"
        for found, expected in zip(outputs.get("hidden_states") or outputs.get("decoder_hidden_states") or (), states):
            assert torch.equal(found, expected), "hidden states that were kept"


@act(lambda side: bool(side.kept))
def go_backward_from_kept_outputs(side: Side, choice: Random) -> None:
    """From the newest, or all at once, where no weight was changed since: torch refuses it for both then."""
    kept = side.kept[-1:] if choice.random() < 0.5 else side.kept
    losses = [each.outputs.loss for each in kept if each.outputs.loss.requires_grad]
    if losses:
        sum(losses).backward()
        side.model.zero_grad()


@act(lambda side: bool(side.kept))
def keep_only_the_outputs(side: Side, choice: Random) -> None:
    """The model that has computed them goes away; a copy goes on."""
    side.model = copy.deepcopy(side.model)
    gc.collect()
