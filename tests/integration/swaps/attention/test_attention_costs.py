"""Counted: what attention moves and holds in models, with few layers."""

from contextlib import ExitStack

import pytest
import torch
from torch._subclasses import FakeTensorMode
from transformers import AttentionInterface, StaticCache

import kernels_ext_npu
from kernels_ext_npu.measuring.costs import Cost
from tests.support.costs import fake_model
from tests.support.memory import Largest

SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
QWEN3_8B = {"hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128, "num_hidden_layers": 2, "vocab_size": 64}


def test_a_step_of_decoding_over_a_static_cache_reads_keys_and_values_once(registered, monkeypatch) -> None:
    """At the sizes of Qwen3-8B, over 4,096 places: keys and values are 16.8 MB a layer, and no head is copied."""
    attention = AttentionInterface._global_mapping["sdpa"]
    moved = []

    def counted(*args: object, **kwargs: object) -> object:
        with Cost() as cost:
            result = attention(*args, **kwargs)
        moved.append(cost.bytes.total() / 1e6)
        return result

    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model = kernels_ext_npu.kernelize(
            fake_model("qwen3", **QWEN3_8B, num_attention_heads=32, num_key_value_heads=8).eval()
        )
        cache = StaticCache(config=model.config, max_cache_len=4096)
        model(torch.ones(1, 16, dtype=torch.long, device="npu"), past_key_values=cache)
        monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", counted)
        model(torch.ones(1, 1, dtype=torch.long, device="npu"), past_key_values=cache)
    assert len(moved) == 2
    assert max(moved) <= 20


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
