"""The memory that a packed MLP takes in training."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

import kernels_ext_npu
from tests.support import memory

SIZES = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = 1024


def concatenating(self: nn.Module, x: Tensor) -> Tensor:
    """What others do to be able to call npu_swiglu."""
    return self.down_proj(torch.ops.npu.npu_swiglu(torch.cat((self.gate_proj(x), self.up_proj(x)), -1), -1))


def peak(prepare: Callable[[nn.Module], object]) -> int:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **SIZES)).to("npu").train()
    prepare(model)
    return memory.peak(model, torch.zeros(4, TOKENS // 4, dtype=torch.long, device="npu"))


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
