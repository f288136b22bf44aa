"""Acts on attention: which implementation a model names, and what its modules compute with.

The implementation of ours can be named while its repository is registered. The twin keeps the one that it has then: all
of them compute the same.
"""

from __future__ import annotations

import copy
from random import Random
from typing import Any

import torch

from kernels_ext_npu.swapping import state
from kernels_ext_npu.swapping.attention_choice import NAME, ON_HUB, REPOSITORY
from tests.support.programs import variants
from tests.support.programs.registry import act
from tests.support.programs.side import Side

OTHERS = ("eager", "sdpa")


def can_name_ours(side: Side) -> bool:
    """Tell whether the implementation of ours is there to be named."""
    return state.uses(REPOSITORY)


@act(can_name_ours)
def name_our_attention(side: Side, choice: Random) -> None:
    requested = choice.choice([NAME, ON_HUB, {"": NAME}])
    if side.has_kernels:
        side.pretrained.set_attn_implementation(requested)


@act(can_name_ours)
def write_our_attention_into_the_config(side: Side, choice: Random) -> None:
    if side.has_kernels:
        side.pretrained.config._attn_implementation = NAME


@act()
def name_another_attention(side: Side, choice: Random) -> None:
    name = choice.choice(OTHERS)
    side.pretrained.set_attn_implementation(choice.choice([name, {"": name}]))


@act()
def write_another_attention_into_the_config(side: Side, choice: Random) -> None:
    """Eager attention: every model has it, and nobody checks what is written."""
    side.pretrained.config._attn_implementation = "eager"


@act()
def give_the_model_a_copy_of_its_config(side: Side, choice: Random) -> None:
    """Its modules keep the one that they have, and the model chooses the mask by another one."""
    side.pretrained.config = copy.deepcopy(side.pretrained.config)


@act()
def change_the_scale_of_scores(side: Side, choice: Random) -> None:
    _, module = choice.choice(side.named("Attention"))
    module.scaling = choice.choice([0.125, 0.5])


@act()
def call_with_padding(side: Side, choice: Random) -> None:
    """What stands at padding is nobody's business."""
    mask = torch.ones_like(side.inputs["input_ids"])
    if choice.random() < 0.5:
        mask[0, :2] = 0
    else:
        mask[0, 3:] = 0
    logits = side.run(attention_mask=mask).logits
    side.show(logits[mask.bool()])


@act()
def call_with_a_mask_of_four_dimensions(side: Side, choice: Random) -> None:
    """A mask of the caller's own, added to the scores: every token sees itself and the first one."""
    size = variants.IDS.shape[1]
    seen = torch.eye(size, dtype=torch.bool)
    seen[:, 0] = True
    dtype = next(p.dtype for _, p in side.parameters())
    mask = torch.zeros(size, size, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    side.show(side.run_text(attention_mask=mask[None, None].expand(2, 1, -1, -1).to(side.device)).logits)


@act()
def call_with_packed_sequences(side: Side, choice: Random) -> None:
    """Two sequences in a row, which the positions tell apart."""
    positions = torch.tensor([[0, 1, 2, 0, 1]], device=side.device)
    options: dict[str, Any] = {"input_ids": variants.IDS[:1].to(side.device), "labels": None}
    side.show(side.run_text(position_ids=positions, **options).logits)


@act()
def call_token_by_token(side: Side, choice: Random) -> None:
    """The first tokens at once, then one with the cache."""
    ids = variants.IDS.to(side.device)
    with torch.no_grad():
        first = side.model(input_ids=ids[:, :-1], use_cache=True)
        side.show(side.model(input_ids=ids[:, -1:], past_key_values=first.past_key_values).logits)
