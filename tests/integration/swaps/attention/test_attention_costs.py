"""Counted: what attention holds in models, with few layers."""

from contextlib import ExitStack

import pytest
import torch
from torch._subclasses import FakeTensorMode

import kernels_ext_npu
from tests.support.costs import fake_model
from tests.support.memory import Largest

SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_no_tensor_has_an_element_for_each_query_and_key(registered, name, training) -> None:
    tokens = 3000  # more than the side of the mask that all lengths share
    sizes = SMALL | HEADS | ({"sliding_window": 512} if name != "qwen3" else {})
    sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2} if name == "gpt_oss" else {}
    with FakeTensorMode(allow_non_fake_inputs=True), ExitStack() as modes:
        model = kernels_ext_npu.kernelize(fake_model(name, **sizes).train(training))
        model(torch.zeros(1, 8, dtype=torch.long, device="npu"), use_cache=False)  # makes the mask of all lengths
        largest = modes.enter_context(Largest())
        logits = model(torch.zeros(1, tokens, dtype=torch.long, device="npu"), use_cache=False).logits
        if training:
            logits.sum().backward()
    assert 0 < largest.elements < tokens**2
