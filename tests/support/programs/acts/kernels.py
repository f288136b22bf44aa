"""Acts of kernels: registered, swapped in and out, in parts too. For the twin they are nothing."""

from random import Random

import kernels
import torch

import kernels_ext_npu
from kernels_ext_npu.binding import registration
from kernels_ext_npu.catalogue import REPOSITORIES
from tests.support.programs.registry import act
from tests.support.programs.side import Side

PARTS = ("DecoderLayer", "Block", "MLP", "Mlp", "Norm", "Model", "Attention", "DeltaNet", "GELUActivation")


def on_npu(side: Side) -> bool:
    """Tell whether kernels can be swapped in, so that the act is no refusal."""
    return side.device.type == "npu" or not side.has_kernels


@act()
def register(side: Side, choice: Random) -> None:
    if side.has_kernels:
        kernels_ext_npu.register()


@act()
def register_some(side: Side, choice: Random) -> None:
    if side.has_kernels:
        kernels_ext_npu.register(kernels=choice.sample(REPOSITORIES, choice.randint(1, 3)))


@act()
def unregister(side: Side, choice: Random) -> None:
    if side.has_kernels:
        kernels_ext_npu.unregister()


@act(on_npu)
def kernelize(side: Side, choice: Random) -> None:
    if side.has_kernels:
        kernels_ext_npu.kernelize(side.model)


@act(on_npu)
def kernelize_a_part(side: Side, choice: Random) -> None:
    parts = side.named(*PARTS)
    # a norm that parametrizes a weight has none, and is on no device
    _, module = choice.choice([(path, part) for path, part in parts if any(True for _ in part.parameters())])
    if side.has_kernels:
        kernels_ext_npu.kernelize(module)


@act()
def restore(side: Side, choice: Random) -> None:
    if side.has_kernels:
        kernels_ext_npu.restore(side.model)


@act()
def restore_a_part(side: Side, choice: Random) -> None:
    _, module = choice.choice(side.named(*PARTS))
    if side.has_kernels:
        kernels_ext_npu.restore(module)


@act(
    lambda side: on_npu(side) and registration.current is not None
)  # otherwise transformers takes its own, from the Hub
def use_kernels(side: Side, choice: Random) -> None:
    side.asked = True
    if side.has_kernels:
        side.pretrained.use_kernels = True


@act()
def use_no_kernels(side: Side, choice: Random) -> None:
    if side.has_kernels:
        side.pretrained.use_kernels = False


@act(lambda side: side.is_experts and on_npu(side))
def transpose_experts(side: Side, choice: Random) -> None:
    if side.has_kernels:
        kernels_ext_npu.kernelize(side.model)
        kernels_ext_npu.transpose_experts(side.model)


@act(on_npu)
def kernelize_for_training(side: Side, choice: Random) -> None:
    if side.has_kernels:
        kernels_ext_npu.kernelize(side.model, mode=kernels.Mode.TRAINING)


@act(on_npu)
def kernelize_in_inference_mode(side: Side, choice: Random) -> None:
    if side.has_kernels:
        with torch.inference_mode():
            kernels_ext_npu.kernelize(side.model)


@act()
def restore_in_inference_mode(side: Side, choice: Random) -> None:
    if side.has_kernels:
        with torch.inference_mode():
            kernels_ext_npu.restore(side.model)


@act(lambda side: side.is_experts and side.device.type == side.home)
def name_an_experts_implementation(side: Side, choice: Random) -> None:
    """The twin keeps the one of the modeling file."""
    name = choice.choice(["eager", "batched_mm", "grouped_mm"])
    if side.has_kernels:
        side.pretrained.set_experts_implementation(name)
