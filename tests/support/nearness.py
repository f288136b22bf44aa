"""Compare results, gradients and whole models with those that they have to be. Nothing here knows of kernels."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.support import zoo

# float32 through up to a few dozen operations a layer, relative to the norm of the result
TOLERANCE = 1e-5


def assert_near(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> float:
    """Compare a result relative to the norm of what it has to be, wherever both are. Returns the difference."""
    assert found.shape == expected.shape
    found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
    difference = ((found - expected).norm() / expected.norm().clamp(min=1e-30)).item()
    assert difference <= tolerance
    return difference


def assert_each_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compare every value, relative to the largest, or to one where all are smaller."""
    found, expected = found.detach().cpu(), expected.detach().cpu()
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= tolerance * max(1.0, float(expected.abs().max()))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of the parameters that have one, by name."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients_near(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = TOLERANCE
) -> float:
    """Compare each gradient relative to the norm of all: some are all but zero. Returns the largest difference."""
    assert found.keys() == expected.keys()
    whole = torch.stack([gradient.double().norm().cpu() for gradient in expected.values()]).norm()
    apart = {name: ((found[name].cpu() - each.cpu()).double().norm() / whole).item() for name, each in expected.items()}
    assert not {name: difference for name, difference in apart.items() if not difference <= tolerance}
    return max(apart.values())


def assert_same_model(
    name: str, model: PreTrainedModel, reference: PreTrainedModel, kept: Callable[[Tensor], Tensor] = lambda x: x
) -> float:
    """Compare outputs, gradients and generated tokens of two models of the zoo; returns the largest difference.

    ``kept`` are the parts of outputs that mean something.
    """
    inputs, moved = zoo.inputs(name, reference), zoo.inputs(name, model)
    expected, found = (list(map(kept, zoo.tensors(outputs))) for outputs in (reference(**inputs), model(**moved)))
    assert [each.dtype for each in found] == [each.dtype for each in expected]
    largest = max(assert_near(a, b) for a, b in zip(found, expected, strict=True))
    zoo.loss(expected).backward()
    zoo.loss(found).backward()
    largest = max(largest, assert_gradients_near(gradients(model), gradients(reference)))
    if zoo.can_generate(name):
        options = {"max_new_tokens": 4, "do_sample": False}
        assert torch.equal(model.generate(**moved, **options).cpu(), reference.generate(**inputs, **options))
    return largest
