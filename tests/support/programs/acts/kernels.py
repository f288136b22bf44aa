"""Acts of kernels: registered, swapped in and out, in parts too. For the twin they are nothing."""

from functools import partial
from random import Random
from typing import Any

import kernels
import torch
from torch import nn
from transformers import PreTrainedModel

import kernels_ext_npu
from kernels_ext_npu.binding import registration
from kernels_ext_npu.catalogue import REPOSITORIES
from tests.support.programs.registry import act, acts
from tests.support.programs.side import Side

PARTS = ("DecoderLayer", "Block", "MLP", "Mlp", "Norm", "Model", "Attention", "DeltaNet", "GELUActivation")
ours = partial(act, is_ours=True)


def on_npu(side: Side) -> bool:
    """Tell whether kernels can be swapped in, so that the act is no refusal."""
    return side.device.type == "npu" or not side.has_kernels


def inner(side: Side) -> list[tuple[str, Any]]:
    """Return the models inside the model, such as one of pictures and one of text, with their paths."""
    whole = side.pretrained
    return [(path, m) for path, m in side.model.named_modules() if isinstance(m, PreTrainedModel) and m is not whole]


def part(side: Side, choice: Random) -> nn.Module:
    """Choose a part: a module, or a model inside the model."""
    return choice.choice(list((dict(side.named(*PARTS)) | dict(inner(side))).values()))


acts(
    is_ours=True,
    register=lambda side, choice: kernels_ext_npu.register(),
    register_some=lambda side, choice: kernels_ext_npu.register(
        kernels=choice.sample(REPOSITORIES, choice.randint(1, 3))
    ),
    unregister=lambda side, choice: kernels_ext_npu.unregister(),
    restore=lambda side, choice: kernels_ext_npu.restore(side.model),
    restore_in_inference_mode=lambda side, choice: torch.inference_mode()(kernels_ext_npu.restore)(side.model),
    use_no_kernels=lambda side, choice: setattr(side.pretrained, "use_kernels", False),
)
acts(
    on_npu,
    is_ours=True,
    kernelize=lambda side, choice: kernels_ext_npu.kernelize(side.model),
    kernelize_for_training=lambda side, choice: kernels_ext_npu.kernelize(side.model, mode=kernels.Mode.TRAINING),
    kernelize_in_inference_mode=lambda side, choice: torch.inference_mode()(kernels_ext_npu.kernelize)(side.model),
)


@ours(on_npu)
def kernelize_a_part(side: Side, choice: Random) -> None:
    module = part(side, choice)
    if any(True for _ in module.parameters()):  # a norm that parametrizes a weight has none, and is on no device
        kernels_ext_npu.kernelize(module)


@ours()
def restore_a_part(side: Side, choice: Random) -> None:
    kernels_ext_npu.restore(part(side, choice))


@ours()
def report_on_an_inner_model(side: Side, choice: Random) -> None:
    """What is said of a part is what is said of it in the whole."""
    path, model = choice.choice(inner(side))
    shared = dict(side.model.named_modules(remove_duplicate=False))  # a module in two places has a row in the first
    whole = {shared.get(row.path, row.path): row.swapped for row in kernels_ext_npu.report(side.model)}
    for row in kernels_ext_npu.report(model):
        assert whole[shared.get(place := f"{path}.{row.path}", place)] == row.swapped, row


# without a registration transformers takes its own, from the Hub
@ours(lambda side: on_npu(side) and registration.current is not None)
def use_kernels(side: Side, choice: Random) -> None:
    side.asked = True
    side.pretrained.use_kernels = True


@ours(lambda side: side.is_experts and side.device.type == side.home)
def name_an_experts_implementation(side: Side, choice: Random) -> None:
    """The twin keeps the one of the modeling file."""
    side.pretrained.set_experts_implementation(choice.choice(["eager", "batched_mm", "grouped_mm"]))


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
