"""Acts on linear attention: its functions, its convolution, and what a cache carries on."""

import sys
from random import Random
from typing import Any

import torch
from torch import nn

from kernels_ext_npu.matching.decorated import original_function
from tests.support.programs import variants
from tests.support.programs.acts.hooks import drawn, times
from tests.support.programs.registry import act, acts
from tests.support.programs.side import Side


def mixers(side: Side) -> list[Any]:
    """Return the modules that compute linear attention."""
    return [module for _, module in side.named("GatedDeltaNet")]


def has_mixers(side: Side) -> bool:
    """Tell whether there is linear attention."""
    return bool(mixers(side))


acts(
    has_mixers,
    change_the_activation_of_a_convolution=lambda side, choice: setattr(
        choice.choice(mixers(side)), "activation", choice.choice(["silu", "swish", None, "relu", "gelu"])
    ),
)


@act(has_mixers)
def replace_a_convolution(side: Side, choice: Random) -> None:
    """By another one, perhaps with a bias."""
    mixer = choice.choice(mixers(side))
    old = mixer.conv1d
    new = nn.Conv1d(
        old.in_channels, old.out_channels, old.kernel_size[0], groups=old.groups, padding=old.padding[0],
        bias=choice.random() < 0.75, device=side.device, dtype=old.weight.dtype,
    )  # fmt: skip
    mixer.conv1d = drawn(new, 9, 2)


@act(has_mixers)
def change_how_fast_states_fade(side: Side, choice: Random) -> None:
    mixer = choice.choice(mixers(side))
    with torch.no_grad():
        mixer.A_log.fill_(choice.choice([-2.0, 0.5, 3.0]))
        mixer.dt_bias.add_(choice.choice([-1.0, 2.0]))


FUNCTIONS = (
    *("causal_conv1d_fn", "causal_conv1d_update", "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
)


@act(has_mixers)
def replace_a_function_of_linear_attention(side: Side, choice: Random) -> None:
    """In its file, as patches of frameworks do; both sides have one file, which is changed once."""
    name = choice.choice(FUNCTIONS)
    module = sys.modules[type(mixers(side)[0]).__module__]
    before = vars(module)[name]
    own = original_function(before)
    if own is None or own.__name__ != name:
        return

    def replaced(*args: Any, **kwargs: Any) -> Any:
        return times(own(*args, **kwargs))

    setattr(module, name, replaced)
    side.cleanups.append(lambda: setattr(module, name, before))


@act()
def decode_some_tokens(side: Side, choice: Random) -> None:
    """One after the other, and two at once, with one cache."""
    ids = variants.IDS.to(side.device)
    with torch.no_grad():
        cache = side.model(input_ids=ids[:, :2], use_cache=True).past_key_values
        for start, end in ((2, 3), (3, 5), (0, 1)):
            logits = side.model(input_ids=ids[:, start:end], past_key_values=cache).logits
        side.show(logits)


@act()
def call_token_by_token(side: Side, choice: Random) -> None:
    """The first tokens at once, then one with the cache, which takes no gradients, while the token may take some."""
    ids = variants.IDS.to(side.device)
    with torch.no_grad():
        cache = side.model(input_ids=ids[:, :-1], use_cache=True).past_key_values
    with torch.set_grad_enabled(choice.random() < 0.5):
        side.show(side.model(input_ids=ids[:, -1:], past_key_values=cache).logits)
