"""Acts on attention: which implementation a model names, and what its modules compute with.

The implementation of ours can be named while its repository is registered. The twin keeps the one that it has then: all
of them compute the same.
"""

import copy
import sys
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kernels_ext_npu.binding import registration
from kernels_ext_npu.catalogue import IMPLEMENTATION as NAME
from kernels_ext_npu.distribution import sources
from kernels_ext_npu.transformers_internals import original_function
from tests.support.programs import variants
from tests.support.programs.acts.calls import show_loss
from tests.support.programs.acts.modules import drawn, patch, times
from tests.support.programs.registry import act, acts
from tests.support.programs.side import Side, has_targets

REPOSITORY = "FlashAttention"
ON_HUB = f"{sources.ORGANISATION}/{REPOSITORY}"
OTHERS = ("eager", "sdpa")


def can_name_ours(side: Side) -> bool:
    """Tell whether the implementation of ours is there to be named, and sees all that others do."""
    return registration.uses(REPOSITORY) and not side.is_altered


def names_nothing(side: Side) -> bool:
    """Tell whether no part of the model names the implementation of ours."""
    configs = (getattr(module, "config", None) for module in side.model.modules())
    return all(getattr(config, "_attn_implementation", None) != NAME for config in configs)


acts(
    can_name_ours,
    is_ours=True,
    name_our_attention=lambda side, choice: side.pretrained.set_attn_implementation(
        choice.choice([NAME, ON_HUB, {"": NAME}])
    ),
    write_our_attention_into_the_config=lambda side, choice: setattr(
        side.pretrained.config, "_attn_implementation", NAME
    ),
)
acts(
    # eager attention: every model has it, and nobody checks what is written
    write_another_attention_into_the_config=lambda side, choice: setattr(
        side.pretrained.config, "_attn_implementation", "eager"
    ),
    # its modules keep the one that they have, and the model chooses the mask by another one
    give_the_model_a_copy_of_its_config=lambda side, choice: setattr(
        side.pretrained, "config", copy.deepcopy(side.pretrained.config)
    ),
)


@act()
def name_another_attention(side: Side, choice: Random) -> None:
    """For all of a model, or for each of the models inside."""
    name, other = (choice.choice(OTHERS) for _ in range(2))
    names = {"text_config": name, "vision_config": other} if side.variant == "pictures" else {"": name}
    side.pretrained.set_attn_implementation(choice.choice([name, names]))


PADDING = {"left": slice(2), "right": slice(3, None), "last": slice(4, None), "middle": slice(1, 3)}


def padding(side: Side, choice: Random) -> Tensor:
    """Choose what of the first row is padding."""
    mask = torch.ones_like(side.inputs["input_ids"])
    mask[0, PADDING[choice.choice(list(PADDING))]] = 0
    return mask


@act()
def call_with_padding(side: Side, choice: Random) -> None:
    """Every row that sees a key is compared; on the left none does, and each implementation gives what it likes."""
    mask = padding(side, choice)
    _show_rows(side, mask.cumsum(-1) > 0, attention_mask=mask)


@act(has_targets)
def call_with_padded_sources_and_targets(side: Side, choice: Random) -> None:
    """Of one length, as where a tokenizer pads to the longest there may be, or of two; each target sees a source."""
    length = choice.choice([5, 5, 3])
    ids, target = (side.inputs[name][:, :length] for name in ("labels", "decoder_input_ids"))
    given = {"attention_mask": padding(side, choice), "labels": ids.clone(), "decoder_input_ids": target}
    seen = torch.ones_like(target, dtype=torch.bool)
    if choice.random() < 0.5:
        given["decoder_attention_mask"] = padding(side, choice)[:, :length]
        seen = given["decoder_attention_mask"].cumsum(-1) > 0
    _show_rows(side, seen, **given)


def _show_rows(side: Side, seen: Tensor, **given: Any) -> None:
    """Show logits of some rows, and gradients of their loss: of the words there, or the next ones."""
    labels = given.get("labels", side.inputs["labels"]).masked_fill(~(seen & seen.roll(1, 1)), -100)
    result = side.run(**given | {"labels": labels})
    side.show(result.logits[seen])
    show_loss(side, result.loss)


@act()
def call_with_a_mask_of_four_dimensions(side: Side, choice: Random) -> None:
    """A mask of the caller's own, added to the scores: every token sees itself and the first one."""
    size = variants.IDS.shape[1]
    seen = torch.eye(size, dtype=torch.bool)
    seen[:, 0] = True
    dtype = next(p.dtype for _, p in side.parameters())
    mask = torch.zeros(size, size, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    side.show(side.run_text(attention_mask=mask[None, None].expand(2, 1, -1, -1).to(side.device)).logits)


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


# ---- linear attention: its functions, its convolution, and what a cache carries on -----------------------------------
def mixers(side: Side) -> list[Any]:
    """Return the modules that compute linear attention."""
    return [module for _, module in side.named("GatedDeltaNet")]


@act(mixers)
def replace_a_convolution(side: Side, choice: Random) -> None:
    """By another one, perhaps with a bias."""
    mixer = choice.choice(mixers(side))
    new = copy.deepcopy(mixer.conv1d)
    new.bias = nn.Parameter(new.weight.detach()[:, 0, 0].clone()) if choice.random() < 0.75 else None
    mixer.conv1d = drawn(new, 9, 2)


RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
FUNCTIONS = ("causal_conv1d_fn", "causal_conv1d_update", *RULES)


@act(mixers)
def replace_a_function_of_linear_attention(side: Side, choice: Random) -> None:
    """In its file, as patches of frameworks do, once."""
    name = choice.choice(FUNCTIONS)
    module = sys.modules[type(mixers(side)[0]).__module__]
    own = original_function(vars(module)[name])
    if side.home == "cpu" and own is not None and own.__name__ == name:
        patch(side, module, name, lambda *args, **kwargs: times(own(*args, **kwargs)))


@act()
def decode_some_tokens(side: Side, choice: Random) -> None:
    """One after the other, and two at once, with one cache, which takes no gradients, while a token may take some."""
    ids = variants.IDS.to(side.device)
    with torch.no_grad():
        cache = side.model(input_ids=ids[:, :2], use_cache=True).past_key_values
    for start, end in ((2, 3), (3, 5), (0, 1)):
        with torch.set_grad_enabled(choice.random() < 0.5):
            logits = side.model(input_ids=ids[:, start:end], past_key_values=cache).logits
    side.show(logits)
