"""Acts on the models inside a model, such as one of pictures and one of text."""

import copy
from random import Random
from typing import Any

import torch
from transformers import PreTrainedModel

import kernels_ext_npu
from tests.support.programs.acts.kernels import on_npu
from tests.support.programs.registry import act
from tests.support.programs.side import Side


def inner(side: Side) -> list[tuple[str, Any]]:
    """Return the models inside the model, with their paths."""
    whole = side.pretrained
    return [(path, m) for path, m in side.model.named_modules() if isinstance(m, PreTrainedModel) and m is not whole]


@act()
def restore_an_inner_model(side: Side, choice: Random) -> None:
    _, model = choice.choice(inner(side))
    if side.has_kernels:
        kernels_ext_npu.restore(model)


@act(on_npu)
def kernelize_an_inner_model(side: Side, choice: Random) -> None:
    _, model = choice.choice(inner(side))
    if side.has_kernels:
        kernels_ext_npu.kernelize(model)


@act()
def report_on_an_inner_model(side: Side, choice: Random) -> None:
    """What is said of a part is what is said of it in the whole."""
    path, model = choice.choice(inner(side))
    if side.has_kernels:
        prefix = f"{path}."
        whole = {row.path: row.swapped for row in kernels_ext_npu.report(side.model)}
        for row in kernels_ext_npu.report(model):
            assert whole[prefix + row.path] == row.swapped, row


@act()
def replace_an_inner_model_by_a_copy(side: Side, choice: Random) -> None:
    path, model = choice.choice(inner(side))
    side.put(path, copy.deepcopy(model))


@act()
def freeze_an_inner_model(side: Side, choice: Random) -> None:
    choice.choice(inner(side))[1].requires_grad_(False)


@act(lambda side: side.variant == "pictures")
def name_the_attention_of_inner_models(side: Side, choice: Random) -> None:
    names = [choice.choice(["eager", "sdpa"]) for _ in range(2)]
    side.pretrained.set_attn_implementation({"text_config": names[0], "vision_config": names[1]})


@act(lambda side: side.variant == "pictures")
def call_without_a_picture(side: Side, choice: Random) -> None:
    result = side.run_text()
    side.show(result.loss)
    side.show(result.logits)


@act()
def call_with_embeddings(side: Side, choice: Random) -> None:
    """In the place of ids, as adapters of prompts do."""
    ids = side.inputs["input_ids"]
    embedded = 1.125 * side.pretrained.get_input_embeddings()(ids)
    side.show(side.run_text(input_ids=None, inputs_embeds=embedded).logits)


@act()
def call_the_model_below_the_head(side: Side, choice: Random) -> None:
    given = {key: value for key, value in side.inputs.items() if key != "labels"}
    with torch.no_grad():
        side.show(side.pretrained.base_model(**given).last_hidden_state)
