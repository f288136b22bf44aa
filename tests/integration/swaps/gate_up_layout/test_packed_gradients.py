"""The gradients of gate and up come from one product and share its storage; a hook gives each one of its own."""

import pytest
import torch
from torch import Tensor, nn
from torch_npu.optim import NpuFusedAdamW

from tests.support import zoo
from tests.support.served import kernelized


def own_storage(parameter: Tensor) -> None:
    """As SwiGLU/README.md says."""
    parameter.grad = parameter.grad.clone()


def backward(model: nn.Module) -> nn.Module:
    """Make gradients; return the first MLP."""
    inputs = zoo.inputs("llama", model)
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    return model.model.layers[0].mlp


def test_both_halves_of_one_product_share_its_storage_until_a_hook_copies_them(registered) -> None:
    model = kernelized("llama")
    mlp = backward(model)
    gate, up = mlp.gate_proj.weight.grad, mlp.up_proj.weight.grad
    assert gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()
    expected = up.cpu()
    mlp.gate_proj.weight.grad = gate = None  # nothing of the other's
    assert torch.equal(up.cpu(), expected)
    model.zero_grad()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(own_storage)
    mlp = backward(model)
    gate, up = mlp.gate_proj.weight.grad, mlp.up_proj.weight.grad
    assert gate.untyped_storage().nbytes() == gate.nbytes
    gate.untyped_storage().resize_(0)
    assert torch.equal(up.cpu(), expected)


def test_optimizers_that_combine_storages_step_with_such_a_hook_and_refuse_without(registered) -> None:
    """AdamW's first step divides a gradient by its size, so that errors of float32 count where that is near zero."""
    rate = 1e-3
    model, original = kernelized("llama"), zoo.build("llama")
    backward(model)
    with pytest.raises(RuntimeError, match=r"The size of tensor a \(\d+\) must match the size of tensor b"):
        NpuFusedAdamW(model.parameters(), lr=rate).step()
    model = kernelized("llama")
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(own_storage)
    for each, optimizer in ((model, NpuFusedAdamW), (original, torch.optim.AdamW)):
        backward(each)
        optimizer(each.parameters(), lr=rate, weight_decay=0.0).step()
    for found, expected in zip(model.parameters(), original.parameters(), strict=True):
        gradient = expected.grad.abs()
        error = 2**-19 * gradient.max()  # sums of float32 in another order
        allowed = 1e-6 + rate * (error / (gradient + 1e-8)).clamp(max=2)
        assert ((found.detach().cpu() - expected.detach()).abs() <= allowed).all()
