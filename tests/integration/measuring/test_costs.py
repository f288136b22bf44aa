"""The bytes that an operator is counted to move."""

import torch
from torch.nn import functional as F

from kernels_ext_npu.measuring.costs import Cost


def test_gathers_and_scatters_move_the_rows_that_they_touch() -> None:
    """Of a table of 1,000 x 64 floats in 256,000 bytes, by 8 numbers of 8 bytes."""
    table, rows = torch.ones(1000, 64, device="npu"), torch.arange(8, device="npu")
    columns = rows.unsqueeze(-1)
    picked, loss, halves = 8 * 64 * 4, torch.ones((), device="npu"), table.half()
    cases = {
        "embedding": (lambda: F.embedding(rows, table), 2 * picked + 64),
        "index_select": (lambda: table.index_select(0, rows), 2 * picked + 64),
        "gather": (lambda: table.gather(1, columns), 2 * 8 * 4 + 64),
        # op-plugin fills a weight for each of 64 classes, which the loss reads
        "nll_loss_forward": (lambda: F.nll_loss(table[:8], rows), 8 * 4 + 64 + 2 * 4 + 2 * 256),
        "nll_loss_backward": (
            lambda: torch.ops.aten.nll_loss_backward(loss, table[:8], rows, None, 1, -100, loss),
            # ones for the weights of classes, and labels that are cast, are written and read
            picked + 2 * 64 * 4 + 64 + 2 * 32 + 2 * 4,
        ),
        "zeros_like": (lambda: torch.zeros_like(table), 256_000),
        "copy_": (lambda: table.copy_(halves), 256_000 + 128_000),
        "fill_": (lambda: table.fill_(0.5), 256_000),
        "new_ones": (lambda: table.new_ones(8, 64), picked),
        "exp": (lambda: torch.exp(halves, out=halves), 2 * 128_000),  # where a result is put is written and not read
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
    # of the indices nothing is read: op-plugin hands on the rows, where they came from, and how many a token has
    assert cost.bytes == {"npu_moe_token_permute_grad": 512 + 64 + 256, "npu_rotary_mul_backward": 4 * 512}
    with Cost() as cost:
        torch.ops.npu.npu_rotary_mul_backward(x, x, cos.requires_grad_(), sin)
    assert cost.bytes == {"npu_rotary_mul_backward": 7 * 512}
