"""The memory of a training step, read from torch_npu's allocator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

import kernels_ext_npu

SIZES = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = 1024


def concatenating(self: nn.Module, x: Tensor) -> Tensor:
    """What others do to be able to call npu_swiglu."""
    return self.down_proj(torch.ops.npu.npu_swiglu(torch.cat((self.gate_proj(x), self.up_proj(x)), -1), -1))


def requested(when: str) -> int:
    """Bytes that were asked for: blocks are larger, by what was free beside them."""
    return torch.npu.memory_stats()[f"requested_bytes.all.{when}"]


def peak(prepare: Callable[[nn.Module], object]) -> int:
    """The bytes that a forward and backward add to what the model holds with its gradients."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **SIZES)).to("npu").train()
    prepare(model)
    ids = torch.zeros(4, TOKENS // 4, dtype=torch.long, device="npu")
    for measured in (False, True):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        torch.npu.reset_peak_memory_stats()
        before = requested("current")
        model.model(ids, use_cache=False).last_hidden_state.sum().backward()
        if measured:
            return requested("peak") - before
    raise AssertionError


@pytest.fixture
def norms_only(monkeypatch: pytest.MonkeyPatch, registered: None) -> Callable[[nn.Module], None]:
    """Kernels for everything but the MLP, which concatenates: what differs is the MLP alone."""

    def prepare(model: nn.Module) -> None:
        kernels_ext_npu.kernelize(model)
        for module in model.modules():
            if isinstance(module, LlamaMLP):
                del module.forward
        monkeypatch.setattr(LlamaMLP, "forward", concatenating)

    return prepare


def test_a_training_step_takes_less_than_the_original_and_the_concatenating_form(registered, norms_only) -> None:
    packed = peak(kernels_ext_npu.kernelize)
    concatenated = peak(norms_only)
    kernels_ext_npu.unregister()
    original = peak(lambda model: None)
    print(f"of the original {packed / original:.2f}, of the concatenating form {packed / concatenated:.2f}")
    # The gradient's peak is in the last layer; the first one keeps a tensor of the inner size less, and two less. The
    # gradient of one weight waits in the node until autograd gets all.
    inner = TOKENS * SIZES["intermediate_size"] * 4
    weight = SIZES["hidden_size"] * SIZES["intermediate_size"] * 4
    assert packed <= concatenated - inner + weight
    assert packed <= original - 2 * inner + weight
