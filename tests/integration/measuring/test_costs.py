"""Counted: what a model launches and moves, at the sizes of Qwen3-8B, two layers of it."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

import kernels_ext_npu
from kernels_ext_npu.measuring.costs import Cost
from tests.support.costs import costs
from tests.support.sizes import sizes

# the embedding is nobody's kernel: 1,024 words in place of 151,936
QWEN3_8B = sizes(4096, 12288, heads=32, keys=8, width=128, layers=2, words=1024)


def gigabytes(cost: Cost) -> float:
    return cost.bytes.total() / 1e9


def test_a_packed_mlp_moves_less_than_the_original_and_the_concatenating_form(registered, monkeypatch) -> None:
    """Forward, and forward and backward, of the MLPs alone: what the three models have in common is the same."""
    packed = costs(kernels_ext_npu.kernelize, "qwen3", 4096, **QWEN3_8B)

    def without_mlps(model: nn.Module) -> None:
        kernels_ext_npu.kernelize(model)
        for module in model.modules():
            if isinstance(module, Qwen3MLP):
                vars(module).pop("forward", None)  # none where the class has another forward

    original = costs(without_mlps, "qwen3", 4096, **QWEN3_8B)

    def concatenating(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.ops.npu.npu_swiglu(torch.cat((self.gate_proj(x), self.up_proj(x)), -1), -1))

    monkeypatch.setattr(Qwen3MLP, "forward", concatenating)
    concatenated = costs(without_mlps, "qwen3", 4096, **QWEN3_8B)
    for name, (forward, training) in {"packed": packed, "original": original, "concatenating": concatenated}.items():
        print(f"{name}: {gigabytes(forward):.2f} / {gigabytes(training):.2f} GB")
    for ours, other in ((packed, original), (packed, concatenated)):
        assert gigabytes(ours[0]) < gigabytes(other[0])
        assert gigabytes(ours[1]) < gigabytes(other[1])
        assert ours[0].launches.total() < other[0].launches.total()
    assert gigabytes(original[0]) < gigabytes(concatenated[0])  # without a gradient joining costs more than it saves


def test_where_a_result_is_put_is_written_and_not_read() -> None:
    x, out = (torch.ones(8, 4, device="npu") for _ in range(2))
    with Cost() as made:
        torch.exp(x)
    with Cost() as put:
        torch.exp(x, out=out)
    assert made.bytes.total() == put.bytes.total() == 2 * 8 * 4 * 4


def test_what_an_operator_picks_or_puts_is_moved_and_not_what_it_leaves() -> None:
    """Of a table of 1,000 x 64 floats in 256,000 bytes, by 8 numbers of 8 bytes."""
    table, rows = torch.ones(1000, 64, device="npu"), torch.arange(8, device="npu")
    columns = rows.unsqueeze(-1)
    picked, loss, halves = 8 * 64 * 4, torch.ones((), device="npu"), table.half()
    cases = {
        "embedding": (lambda: F.embedding(rows, table), 2 * picked + 64),
        "index_select": (lambda: table.index_select(0, rows), 2 * picked + 64),
        "index": (lambda: table[rows], 2 * picked + 64),
        "gather": (lambda: table.gather(1, columns), 2 * 8 * 4 + 64),
        "scatter_": (lambda: table.scatter_(1, columns, 0.5), 8 * 4 + 64),
        "nll_loss_forward": (lambda: F.nll_loss(table[:8], rows), 8 * 4 + 64 + 2 * 4),
        "nll_loss_backward": (
            lambda: torch.ops.aten.nll_loss_backward(loss, table[:8], rows, None, 1, -100, loss),
            picked + 64 + 2 * 4,
        ),
        "zeros_like": (lambda: torch.zeros_like(table), 256_000),
        "copy_": (lambda: table.copy_(halves), 256_000 + 128_000),
        "fill_": (lambda: table.fill_(0.5), 256_000),
        "new_ones": (lambda: table.new_ones(8, 64), picked),
    }
    for name, (call, expected) in cases.items():
        with Cost() as cost:
            call()
        assert cost.bytes == {name: expected}, name


def test_gradients_leave_unread_what_they_take_for_its_shape_alone() -> None:
    """Of 16 rows of 8 floats in 512 bytes, which 8 tokens of 256 bytes were copied to, or which were rotated."""
    rows, tokens = torch.ones(16, 8, device="npu"), torch.ones(8, 8, device="npu")
    index, order = torch.zeros(8, 2, dtype=torch.int32, device="npu"), torch.arange(16, device="npu").int()
    x, cos, sin = rows.view(1, 1, 16, 8), *(torch.ones(1, 1, 16, 8, device="npu") for _ in range(2))
    with Cost() as cost:
        torch.ops.npu.npu_moe_token_permute_grad(tokens, rows, index, order)
        torch.ops.npu.npu_rotary_mul_backward(x, x, cos, sin)
    assert cost.bytes == {"npu_moe_token_permute_grad": 512 + 64 + 64 + 256, "npu_rotary_mul_backward": 4 * 512}
    with Cost() as cost:
        torch.ops.npu.npu_rotary_mul_backward(x, x, cos.requires_grad_(), sin)
    assert cost.bytes == {"npu_rotary_mul_backward": 7 * 512}
