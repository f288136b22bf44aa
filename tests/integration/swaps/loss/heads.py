"""Models with heads that defer their logits, beside the same models without kernels."""

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import kernels_ext_npu
from kernels_ext_npu.catalogue import HEADS
from kernels_ext_npu.swaps.loss.deferred_logits import DeferredLogits
from tests.support import served, zoo


def pair(name: str = "qwen3", device: str = "npu") -> tuple[PreTrainedModel, PreTrainedModel]:
    """Build a model of the zoo with kernels on the NPU, and the plain one on a device; without dropout."""
    model = zoo.build(name)
    return kernels_ext_npu.kernelize(copy.deepcopy(model).to("npu")), model.to(device)


def labelled(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Move inputs to the NPU, and add labels, of which some are left out."""
    moved = {key: value.npu() for key, value in inputs.items()}
    labels = moved["decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"].clone()
    labels[:, :2] = -100
    return moved | {"labels": labels}


def head_row(model: nn.Module) -> kernels_ext_npu.Row:
    (row,) = served.rows(model, HEADS.in_models)
    return row


def is_deferred(logits: Tensor) -> bool:
    return isinstance(logits, DeferredLogits) and logits.known is None


def assert_same_gradients(ours: nn.Module, model: nn.Module, tolerance: float = 2**-17) -> None:
    """Compare gradients relative to the largest of the model: sums of float32 in another order."""
    expected = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    largest = max((float(grad.abs().max()) for grad in expected.values()), default=0)
    for name, parameter in ours.named_parameters():
        assert (parameter.grad is None) == (name not in expected), name
        if parameter.grad is not None:
            assert float((parameter.grad.cpu() - expected[name]).abs().max()) <= tolerance * largest, name


def assert_same_step(
    ours: PreTrainedModel, model: PreTrainedModel, given: dict[str, Tensor], deferred: bool, rtol: float = 2**-18
) -> None:
    """Compare a step with the kernel with one without: losses to the rounding of sums in float32, and gradients.

    Logits to the bit: the lines of the model compute them, when the weights that they were computed with are gone.
    """
    torch.manual_seed(1)
    expected = model(**given)
    torch.manual_seed(1)
    found = ours(**given)
    assert is_deferred(found.logits) == deferred
    for _ in range(2):  # gradients add up
        found.loss.backward(retain_graph=True)
        expected.loss.backward(retain_graph=True)
    for parameter in ours.parameters():
        parameter.data.zero_()
    torch.testing.assert_close(found.loss, expected.loss, rtol=rtol, atol=0, equal_nan=True)
    assert torch.equal(found.logits, expected.logits)
    assert_same_gradients(ours, model)
