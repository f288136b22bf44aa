"""Acts of frameworks: averages of weights, steps by weights that are perturbed, models around models, and wrappers."""

from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.support.programs import variants
from tests.support.programs.acts.attention import names_nothing
from tests.support.programs.acts.training import RATE, backward, can_train, step, trained
from tests.support.programs.registry import act
from tests.support.programs.side import Side, has_targets


def scale(side: Side, factor: float) -> None:
    """Scale all weights, as `.data` is written by many."""
    for parameter in side.model.parameters():
        if parameter.is_floating_point():
            parameter.data.mul_(factor)


@act()
def go_on_with_averaged_weights(side: Side, choice: Random) -> None:
    """Stochastic or exponential averages, of a copy that torch makes of the model."""
    averaged = AveragedModel(side.model, multi_avg_fn=choice.choice([None, get_ema_multi_avg_fn(0.75)]))
    for factor in (1.125, 0.9375):
        averaged.update_parameters(side.model)
        scale(side, factor)
    with torch.no_grad():
        side.show(averaged(**side.inputs).logits)
    side.model = averaged.module


@act()
def evaluate_with_other_weights(side: Side, choice: Random) -> None:
    """Write averages over the weights through `.data`, and put back what was there; logits are looked at afterwards."""
    before = [p.data.clone() for p in side.model.parameters()]
    scale(side, 0.875)
    with torch.no_grad():  # with gradients, and no backward, logits wait for a look
        result = side.run()
    for parameter, data in zip(side.model.parameters(), before):
        parameter.data.copy_(data)
    side.show(result.logits)


@act(can_train, computes=True)
def step_by_sam(side: Side, choice: Random) -> None:
    """By the gradient at weights that were moved uphill, and put back; the first outputs are still held."""
    parameters = trained(side)
    side.model.zero_grad()
    first = side.run()
    first.loss.backward()
    before = [p.data.clone() for p in parameters]
    moved = [p for p in parameters if p.grad is not None]
    norm = torch.stack([p.grad.float().norm() for p in moved]).norm().clamp(min=1e-12)
    for parameter in moved:
        parameter.data.add_((parameter.grad * (0.0625 / norm)).to(parameter.dtype))
    backward(side)
    for parameter, data in zip(parameters, before):
        parameter.data = data if choice.random() < 0.5 else parameter.data.copy_(data)
    step(side)
    side.show(first.logits)


@act(can_train)
def step_by_mezo(side: Side, choice: Random) -> None:
    """By two losses without gradients at weights moved forth and back; the step is of one size for both sides."""
    seed, held = choice.randrange(2**16), []

    def move(by: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in trained(side):
            parameter.data.add_(torch.randn(parameter.shape, generator=generator).to(parameter), alpha=by)

    for by in (2.0**-6, -(2.0**-5)):
        move(by)
        with torch.no_grad():
            held.append(side.run())
    move(2.0**-6 + RATE)
    for result in held:
        side.show(result.loss)
        side.show(result.logits)


@act(lambda side: names_nothing(side) and not has_targets(side))
def attend_in_both_directions(side: Side, choice: Random) -> None:
    """As LLM2Vec does; with a mask of padding transformers goes on with the causal one."""
    for _, module in side.named("Attention"):
        module.is_causal = False
    side.is_altered = True


class Packing(PreTrainedModel):
    """A model that makes the positions of packed sequences for the model inside."""

    _supports_sdpa = _supports_flash_attn = _supports_attention_backend = True

    def __init__(self, inner: PreTrainedModel) -> None:
        super().__init__(inner.config)
        self.inner = inner

    def forward(self, input_ids: Tensor, starts: Tensor) -> Any:
        """Call the model inside; sequences begin where the caller says."""
        index = torch.arange(input_ids.shape[1], device=input_ids.device)
        begins = torch.where(starts, index, 0).cummax(-1).values
        return self.inner(input_ids=input_ids, position_ids=index - begins, use_cache=False)


@act()
def call_from_a_model_that_packs(side: Side, choice: Random) -> None:
    starts = torch.tensor([[True, False, choice.random() < 0.5, True, False]], device=side.device)
    side.show(Packing(side.pretrained)(input_ids=variants.IDS[:1].to(side.device), starts=starts).logits)


@act(names_nothing)
def wrap_attention_by_name(side: Side, choice: Random) -> None:
    """As ms-swift does for all models of the process: whoever names nothing calls the wrapper."""
    side.is_altered = True
    entry = ALL_ATTENTION_FUNCTIONS["sdpa"]
    side.held.setdefault("entry", entry)
    if side.home != "cpu" or entry.__name__ == "wrapped":  # there is one table, of which the twin takes care
        return

    def wrapped(module: Any, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        output, weights = entry(module, query, 1.25 * key, *args, **kwargs)
        return 1.125 * output, weights

    ALL_ATTENTION_FUNCTIONS["sdpa"] = wrapped
    side.cleanups.append(put_sdpa_back)


@act(lambda side: "entry" in side.held)
def take_the_wrapper_away(side: Side, choice: Random) -> None:
    entry = side.held.pop("entry")
    if side.home == "cpu":
        ALL_ATTENTION_FUNCTIONS["sdpa"] = entry


def put_sdpa_back() -> None:
    """Leave the table as transformers has it."""
    ALL_ATTENTION_FUNCTIONS._local_mapping.pop("sdpa", None)
    AttentionInterface.register("sdpa", sdpa_attention_forward)
