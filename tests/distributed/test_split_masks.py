"""Masks of models while torch splits sequences: padding counts, also where a model gives its masks no positions."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.experimental import context_parallel
from transformers import AutoConfig, AutoModel, PreTrainedModel

import kernels_ext_npu
from tests.distributed import models

pytestmark = pytest.mark.distributed

BERT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 96}
LLAMA4 = models.TEXT | {
    "layer_types": ["chunked_attention", "full_attention"],
    "no_rope_layers": [1, 0],
    "moe_layers": [],
    "intermediate_size_mlp": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "encoder": ("bert", BERT),
    "decoder": ("bert", BERT | {"is_decoder": True}),
    "chunks as long as a row": ("llama4_text", LLAMA4 | {"attention_chunk_size": models.LENGTH}),
    "chunks": ("llama4_text", LLAMA4 | {"attention_chunk_size": models.LENGTH - 2}),
}
PADDING = 2  # tokens, behind each row


def build(name: str) -> PreTrainedModel:
    model_type, sizes = MODELS[name]
    torch.manual_seed(0)
    return AutoModel.from_config(AutoConfig.for_model(model_type, **sizes)).eval()


def difference(name: str, padding: int, length: int = models.LENGTH) -> float | str:
    """Return how far the part of this device is from the whole on the CPU, or what is said in place of it."""
    ids = models.tokens(0)[:, :length].contiguous()
    positions, mask = torch.arange(length).repeat(len(ids), 1), torch.ones_like(ids)
    mask[:, length - padding :] = 0
    given = {"input_ids": ids, "position_ids": positions} | ({"attention_mask": mask} if padding else {})
    kernels_ext_npu.register(everywhere=True)
    try:
        with torch.no_grad():
            expected = build(name)(**given, use_cache=False).last_hidden_state
            model, places = build(name).to("npu"), positions.npu()
            parts = {key: tensor.npu() for key, tensor in given.items()}
            buffers = [places, *parts.values()]
            mesh = dist.init_device_mesh("npu", (dist.get_world_size(),))
            with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers)):
                found, own = model(**parts, use_cache=False).last_hidden_state.cpu(), places.cpu()
    except ValueError as error:
        return str(error)
    finally:
        kernels_ext_npu.unregister()
    error = found - expected.gather(1, own.unsqueeze(-1).expand_as(found))
    return error[own < length - padding].abs().max().item()


@pytest.mark.parametrize("padding", [0, PADDING])
@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_padding_is_left_out(name, padding, two_ranks) -> None:
    """To 1e-5: two layers in float32, with sums in another order."""
    assert max(two_ranks.run(difference, name, padding)) <= 1e-5


def test_chunks_that_hold_whole_rows_are_computed(two_ranks) -> None:
    assert max(two_ranks.run(difference, "chunks as long as a row", 0)) <= 1e-5


@pytest.mark.parametrize("padding", [0, PADDING])
def test_chunks_of_rows_are_refused(padding, two_ranks) -> None:
    for error in two_ranks.run(difference, "chunks", padding):
        assert "the kernel does not compute attention in chunks of 6 tokens" in error


@pytest.mark.parametrize("length", [5, 7])
@pytest.mark.parametrize("padding", [0, PADDING])
@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_parts_of_different_lengths_are_refused(name, padding, length, two_ranks) -> None:
    for error in two_ranks.run(difference, name, padding, length=length, seconds=20):
        assert "pad to a multiple of 4" in str(error), error
