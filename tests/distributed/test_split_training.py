"""Ten steps of training with sequences that torch splits between devices are those of one process."""

from pathlib import Path

import pytest
import torch

from tests.distributed import matrix, split_training
from tests.distributed.conftest import Made
from tests.distributed.models import Tensors

pytestmark = pytest.mark.distributed

# float32: ten steps in which sums are in another order. One process is up to 4e-6 from what it would be in float64.
RELATIVE = 1e-5


@pytest.fixture(scope="module")
def trained(checkpoints, tmp_path_factory) -> Made:
    """What one process computes, in a file for each model; ``+`` behind its name stands for adapters."""
    folder = tmp_path_factory.mktemp("trained")

    def make(name: str) -> Path:
        path = folder / f"{name}.pt"
        torch.save(split_training.whole(checkpoints[name.removesuffix("+")], name.endswith("+")), path)
        return path

    return Made(make)


def assert_trained_alike(found: list[Tensors], truth: Path) -> None:
    expected = torch.load(truth)
    assert len(found) == len(expected) == split_training.STEPS + 1  # behind the steps there are the weights
    for number, (ours, theirs) in enumerate(zip(found, expected)):
        assert ours.keys() == theirs.keys()
        length = torch.cat([tensor.flatten() for name, tensor in theirs.items() if name != "loss"]).norm()
        wrong = {name: ours[name] - tensor for name, tensor in theirs.items()}
        assert wrong.pop("loss", torch.zeros(())).abs() <= RELATIVE, number
        assert torch.cat([tensor.flatten() for tensor in wrong.values()]).norm() <= RELATIVE * length, number
        for name, tensor in wrong.items():  # a small one may be wrong as a whole
            assert tensor.abs().max() <= matrix.TOLERANCE, (number, name)


@pytest.mark.parametrize(
    ("model", "layout", "attention"),
    [
        ("Qwen3", "padded", None),
        ("Qwen3+", "packed", None),  # adapters
        ("Gemma 3", "rows", None),  # windows of four tokens, over blocks of two
        ("Gemma 3", "packed", "npu_flash_attention"),
        ("gpt-oss", "padded", None),
        ("Qwen3-Next", "padded", None),
        ("Qwen2.5-VL", "rows", None),  # each device has some tokens of an image that it sees as a whole
    ],
)
def test_ten_steps(model, layout, attention, two_ranks, checkpoints, trained) -> None:
    folder, is_adapted = checkpoints[model.removesuffix("+")], model.endswith("+")
    for found in two_ranks.run(split_training.split, folder, is_adapted, layout, attention):
        assert_trained_alike(found, trained[model])


@pytest.mark.parametrize(("model", "layout"), [("Qwen3-MoE", "packed"), ("gpt-oss", "padded")])
def test_ten_steps_with_experts_on_other_devices(model, layout, four_ranks, checkpoints, trained) -> None:
    """Two share rows, two share experts, and FSDP2 shards all other weights over four."""
    for found in four_ranks.run(split_training.split, checkpoints[model], False, layout, None, experts=2):
        assert_trained_alike(found, trained[model])
