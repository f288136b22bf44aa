"""q and k of one token a sequence: one launch, the values of two, and nothing that outlives the cos it was made of."""

import functools
from types import ModuleType

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.support import npu_counts

TOGETHER, APART = "npu_mrope", "npu_rotary_mul"


def tables(kernel: ModuleType, size: int, dtype: torch.dtype, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin as a model with the kernel makes them."""
    x = torch.empty(1, dtype=dtype, device="npu")
    return kernel.layers.RotaryEmbedding.forward(embedding(size), x, positions.to("npu"))


@functools.cache
def embedding(size: int) -> LlamaRotaryEmbedding:
    return LlamaRotaryEmbedding(LlamaConfig(head_dim=size)).to("npu")


def heads(batch: int, count: int, size: int, dtype: torch.dtype, unsqueeze_dim: int = 1) -> Tensor:
    made = torch.randn(batch, 1, count, size, generator=torch.Generator().manual_seed(count)).to(dtype).npu()
    return made.transpose(1, 2) if unsqueeze_dim == 1 else made


def launches(kernel: ModuleType, *arguments: object) -> tuple[tuple[Tensor, Tensor], dict[str, int]]:
    npu_counts.reset()
    found = kernel.apply_rotary_pos_emb(*arguments)
    counted = npu_counts.read()
    return found, {name: counted[name] for name in (TOGETHER, APART) if name in counted}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (3, 3), (3, 1)])
@pytest.mark.parametrize(("size", "unsqueeze_dim"), [(64, 1), (128, 2), (96, 1)])
def test_one_launch_gives_the_values_of_two_and_leaves_q_and_k(kernel, dtype, batch, rows, size, unsqueeze_dim) -> None:
    """To the bit: products and sum in float32, and rounded once, both of them. cos may be written to."""
    positions = torch.tensor([[7], [300], [0]])[:rows]
    cos, sin = tables(kernel, size, dtype, positions)
    q, k = (heads(batch, count, size, dtype, unsqueeze_dim) for count in (6, 2))
    before = q.clone(), k.clone()
    found, counted = launches(kernel, q, k, cos, sin, unsqueeze_dim)
    expected, apart = launches(kernel, q, k, cos.clone(), sin.clone(), unsqueeze_dim)
    assert (counted, apart) == ({TOGETHER: 1}, {APART: 2})
    for one, other, given, kept in zip(found, expected, (q, k), before):
        assert torch.equal(one, other)
        assert torch.equal(given, kept)
    npu_counts.reset()
    kernel.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)  # of the next layer
    assert npu_counts.read() == {TOGETHER: 1, "stream_syncs": 0, "device_to_host_copies": 0}
    cos.mul_(2)
    found, counted = launches(kernel, q, k, cos, sin, unsqueeze_dim)
    assert counted == {TOGETHER: 1}
    assert all(map(torch.equal, found, launches(kernel, q, k, cos.clone(), sin.clone(), unsqueeze_dim)[0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cos_that_holds_each_angle_once_is_not_made_twice_as_wide(kernel, dtype) -> None:
    """As gpt-oss has it: one launch in place of four, in every layer."""
    x = torch.empty(1, dtype=dtype, device="npu")
    positions = torch.tensor([[7], [300]], device="npu")
    cos, sin = kernel.layers.RotaryEmbeddingHalfWidth.forward(embedding(64), x, positions)
    q, k = (heads(2, count, 64, dtype) for count in (6, 2))
    rotate = kernel.layers.RotaryPosEmbHalfWidth()
    rotate(q, k, cos, sin)
    npu_counts.reset()
    found = rotate(q, k, cos, sin)
    assert npu_counts.read() == {TOGETHER: 1, "stream_syncs": 0, "device_to_host_copies": 0}
    assert all(map(torch.equal, found, rotate(q, k, cos.clone(), sin.clone())))


@pytest.mark.parametrize("size", [48, 192])
def test_other_heads_and_gradients_go_apart(kernel, size: int) -> None:
    cos, sin = tables(kernel, size, torch.bfloat16, torch.tensor([[3]]))
    q, k = heads(1, 4, size, torch.bfloat16), heads(1, 2, size, torch.bfloat16)
    assert launches(kernel, q, k, cos, sin)[1] == {APART: 2}
    cos, sin = tables(kernel, 64, torch.bfloat16, torch.tensor([[3]]))
    q, k = heads(1, 4, 64, torch.bfloat16).requires_grad_(), heads(1, 2, 64, torch.bfloat16)
    found, counted = launches(kernel, q, k, cos, sin)
    assert counted == {APART: 2}
    found[0].sum().backward()
    assert q.grad is not None


def test_a_replay_follows_a_cos_from_outside_of_the_graph(kernel) -> None:
    """What was made of it before the capture would stay as it is."""
    cos, sin = tables(kernel, 64, torch.float32, torch.tensor([[11]]))
    q, k = heads(1, 4, 64, torch.float32), heads(1, 2, 64, torch.float32)
    kernel.apply_rotary_pos_emb(q, k, cos, sin)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        found = kernel.apply_rotary_pos_emb(q, k, cos, sin)
    for scale in (1.0, 3.0):
        cos.mul_(scale)
        graph.replay()
        expected, _ = launches(kernel, q, k, cos.clone(), sin.clone())
        assert all(map(torch.equal, found, expected))


def test_a_graph_that_makes_cos_rotates_in_one_launch(kernel) -> None:
    positions = torch.tensor([[5]], device="npu")
    embedding(64)
    q, k = heads(1, 4, 64, torch.float32), heads(1, 2, 64, torch.float32)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        found = kernel.apply_rotary_pos_emb(q, k, *tables(kernel, 64, torch.float32, positions))
    for place in (5, 40):
        positions.fill_(place)
        npu_counts.reset()
        graph.replay()
        assert npu_counts.read(in_graphs=True)[TOGETHER] == 1
        cos, sin = tables(kernel, 64, torch.float32, positions)
        expected, _ = launches(kernel, q, k, cos.clone(), sin.clone())
        assert all(map(torch.equal, found, expected))
