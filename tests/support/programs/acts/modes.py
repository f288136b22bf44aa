"""Acts on the mode of a model, and calls in one."""

from random import Random

import torch

from tests.support.programs import variants
from tests.support.programs.registry import act, acts
from tests.support.programs.side import Side


def stays_off_the_hub(side: Side) -> bool:
    """Tell whether a change of the mode does not let transformers take its own kernels from the Hub, as asked.

    Those for the CPU, or, for what was pickled while ours were registered, those for the NPU.
    """
    if side.asked and has_others_where_it_is(side):
        return False
    return side.is_registered or vars(side.pretrained).get("_use_kernels") is not True


def has_others_where_it_is(side: Side) -> bool:
    """Tell whether transformers has kernels of its own for the device that a model is on."""
    return side.is_away and side.variant == "experts with clipped SwiGLU"


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


@act()
def call_without_gradients(side: Side, choice: Random) -> None:
    with choice.choice([torch.no_grad, torch.inference_mode])():
        side.show(side.run().logits)


@act()
def call_with_autocast(side: Side, choice: Random) -> None:
    with torch.autocast(side.device.type, dtype=torch.bfloat16):
        side.show(side.run().logits, torch.bfloat16)


@act()
def call_with_other_weights(side: Side, choice: Random) -> None:
    """torch.func.functional_call with weights that the model does not have."""
    weights = {name: p.detach() * 1.125 for name, p in side.parameters()}
    side.show(torch.func.functional_call(side.model, weights, (), side.inputs).logits)


@act(lambda side: side.variant == "pictures")
def call_without_a_picture(side: Side, choice: Random) -> None:
    result = side.run_text()
    side.show(result.loss)
    side.show(result.logits)


@act()
def call_with_embeddings(side: Side, choice: Random) -> None:
    """In the place of ids, as adapters of prompts do."""
    embedded = 1.125 * side.pretrained.get_input_embeddings()(side.inputs["input_ids"])
    side.show(side.run_text(input_ids=None, inputs_embeds=embedded).logits)


@act()
def call_the_model_below_the_head(side: Side, choice: Random) -> None:
    given = {key: value for key, value in side.inputs.items() if key != "labels"}
    with torch.no_grad():
        side.show(side.pretrained.base_model(**given).last_hidden_state)


@act()
def generate(side: Side, choice: Random) -> None:
    ids = variants.IDS.to(side.device)
    found = side.model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    side.show(found.logits[0])
