"""Calls on both sides of the limits that differ between releases of CANN, of operators alone, whatever kernels ask.

Beyond its limit a release may refuse, crash or hang: then kernels are right to leave the call to torch there. Where it
computes the call, and rightly, they could ask for more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels_ext_npu.selftest import comparing
from kernels_ext_npu.selftest.functions.attention import packed
from kernels_ext_npu.selftest.functions.norms import EPS, quick_gelu, rms_norm
from kernels_ext_npu.selftest.functions.rotary import rotated
from kernels_ext_npu.selftest.operator_call import DTYPE, NEVER, OLDEST, OperatorCall, Pair, draw, launched


def _tables(*shape: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin whose halves are the same."""
    angles = draw(*shape[:-1], shape[-1] // 2, seed=1, dtype=torch.float32)
    return torch.cat((angles, angles), -1).cos().to(DTYPE), torch.cat((angles, angles), -1).sin().to(DTYPE)


def _rotated_together(heads: int) -> Pair:
    q, k, (cos, sin) = draw(1, heads * 128), draw(1, 128, seed=2), _tables(1, 128)
    table = torch.cat((cos[:, :64], sin[:, :64]), -1)
    positions = torch.zeros(1, dtype=torch.long, device="npu")
    found = torch.ops.npu.npu_mrope(positions, q.to("npu"), k.to("npu"), table.to("npu"), 128)
    return list(found), [rotated(x.double().view(-1, 128), cos.double(), sin.double()).view(1, -1) for x in (q, k)]


def _rotated(shape: tuple[int, ...], table: tuple[int, ...], back: bool = False) -> Pair:
    x, (cos, sin) = draw(*shape), _tables(*table)
    given = [t.to("npu") for t in (x, cos, sin)]
    if back:  # of a gradient, beside whatever was rotated
        found, sin = torch.ops.npu.npu_rotary_mul_backward(given[0], *given, "half")[0], -sin
    else:
        found = torch.ops.npu.npu_rotary_mul(*given, "half")
    return [found], [rotated(*comparing.doubled((x, cos, sin)))]


def _gated(experts: int, writes_scores: bool = False) -> Pair:
    x, bias = (draw(*shape, seed=len(shape), dtype=torch.float32) for shape in ((5, experts), (experts,)))
    options = {"k_group": 4, "group_count": 8, "group_select_mode": 1, "norm_type": 1, "out_flag": writes_scores}
    weights, chosen, scores = torch.ops.npu.npu_moe_gating_top_k(x.to("npu"), 8, bias=bias.to("npu"), **options)
    exact = x.double().sigmoid()
    groups = (exact + bias.double()).unflatten(-1, (8, -1))
    best = groups.topk(2, -1).values.sum(-1).topk(4, -1).indices
    others = torch.ones(5, 8, dtype=torch.bool).scatter(-1, best, False).unsqueeze(-1)
    index = groups.masked_fill(others, -torch.inf).flatten(1).topk(8, -1).indices
    expected = exact.gather(-1, index)
    expected = torch.zeros_like(exact).scatter(-1, index, expected / expected.sum(-1, keepdim=True))
    dense = torch.zeros(5, experts).scatter(-1, chosen.long().cpu(), weights.cpu())
    return [dense, *([scores] if writes_scores else [])], [expected, *([exact] if writes_scores else [])]


def _summed(added: bool) -> Pair:
    """Sum products of rows over groups, one of them empty, as the gradients of experts' weights are."""
    a, b, sizes = draw(9, 16), draw(9, 32, seed=1), [4, 0, 5]
    left, right, ends = (t.to("npu") for t in (a, b, torch.tensor([4, 4, 9])))
    if added:
        total = torch.zeros(3 * 16, 32, device="npu")
        torch.ops.npu.npu_grouped_matmul_add_(total, left, right, ends)
        found = total.view(3, 16, 32)
    else:
        (found,) = torch.ops.npu.npu_grouped_matmul([left.t()], [right], group_list=ends, split_item=3, group_type=2)
    parts = zip(a.double().split(sizes), b.double().split(sizes))
    return [found], [torch.stack([one.T @ other for one, other in parts])]


def _normed(dtype: torch.dtype) -> Pair:
    x, weight = draw(4, 64), draw(64, seed=1, dtype=dtype)
    found = torch.ops.npu.npu_rms_norm(x.to("npu"), weight.to("npu"), EPS)[0]
    return [found], [rms_norm(x.double(), weight.double())]


def _fast_gelu(captured: bool) -> Pair:
    x = draw(4, 64)
    given = x.to("npu")
    return [launched(lambda: torch.ops.npu.npu_fast_gelu(given), captured)], [quick_gelu(x.double())]


def _packed(size: int, before: int, ends_on: str = "host", trains: bool = True) -> Pair:
    """Compute two packed sequences of causal attention that sees some keys before its own."""
    leaves = [draw(7, 1, size, seed=seed) for seed in range(3)]
    grad, scale = draw(7, 1, size, seed=3), size**-0.5
    q, k, v = (leaf.to("npu").requires_grad_(trains) for leaf in leaves)
    mask = torch.ones(2048, 2048, dtype=torch.bool, device="npu").triu(1)
    # the version that takes lengths as numbers is in every release
    name = "npu_fusion_attention" if ends_on == "host" else "npu_fusion_attention_v3"
    ends: Any = [3, 7] if ends_on == "host" else torch.tensor([3, 7], dtype=torch.int64, device=ends_on)
    operator = getattr(torch.ops.npu, name)
    out = operator(q, k, v, 1, "TND", None, None, mask, scale, 1.0, before, 0, 0, None, ends, ends, 4)[0]
    exact = [leaf.double().requires_grad_(trains) for leaf in leaves]
    expected = packed(exact[0], exact[1], exact[2], [3, 4], [3, 4], scale, causal=True, window=(before, 0))
    if trains:
        out.backward(grad.to("npu"))
        expected.backward(grad.double())
    gradients, expected_gradients = ([t.grad for t in leaves if t.grad is not None] for leaves in ((q, k, v), exact))
    return [out.detach(), *gradients], [expected.detach(), *expected_gradients]


LIMITS = (
    OperatorCall("npu_mrope, 42 heads of 128", lambda: _rotated_together(42), OLDEST),
    OperatorCall("npu_mrope, 43 heads of 128", lambda: _rotated_together(43), (8, 5)),
    OperatorCall("npu_mrope, 53 heads of 128", lambda: _rotated_together(53), (8, 5)),
    OperatorCall("npu_mrope, 54 heads of 128", lambda: _rotated_together(54), (9, 0)),
    OperatorCall("npu_rotary_mul, four dimensions", lambda: _rotated((1, 9, 2, 64), (1, 9, 1, 64)), OLDEST),
    OperatorCall("npu_rotary_mul, three dimensions", lambda: _rotated((9, 2, 64), (9, 1, 64)), (8, 5)),
    OperatorCall("npu_rotary_mul_backward, 8 of 9", lambda: _rotated((8, 2, 9, 64), (8, 1, 9, 64), back=True), OLDEST),
    OperatorCall("npu_rotary_mul_backward, 8 of 8", lambda: _rotated((8, 2, 8, 64), (8, 1, 8, 64), back=True), NEVER),
    OperatorCall("npu_moe_gating_top_k, 256 experts", lambda: _gated(256), OLDEST),
    OperatorCall("npu_moe_gating_top_k, 128 experts", lambda: _gated(128), (8, 3)),
    OperatorCall("npu_moe_gating_top_k, all scores", lambda: _gated(256, writes_scores=True), (8, 3)),
    OperatorCall("npu_grouped_matmul_add_, sums of groups", lambda: _summed(added=True), OLDEST),
    OperatorCall("npu_grouped_matmul, sums of groups", lambda: _summed(added=False), (8, 3)),
    OperatorCall("npu_rms_norm, a weight like x", lambda: _normed(DTYPE), OLDEST),
    OperatorCall("npu_rms_norm, a weight in float32", lambda: _normed(torch.float32), (8, 3)),
    OperatorCall("npu_fast_gelu, launched", lambda: _fast_gelu(captured=False), OLDEST),
    OperatorCall("npu_fast_gelu, captured", lambda: _fast_gelu(captured=True), (8, 5)),
    OperatorCall("packed attention, a head of 512", lambda: _packed(512, 1), OLDEST),
    OperatorCall("packed attention, a head of 520", lambda: _packed(520, 1), (8, 5)),
    OperatorCall("packed attention, two keys", lambda: _packed(64, 1), OLDEST),
    OperatorCall("packed attention, one key", lambda: _packed(64, 0), NEVER),
    OperatorCall("packed attention, one key, inference", lambda: _packed(64, 0, trains=False), OLDEST),
    OperatorCall("packed attention, lengths on the NPU", lambda: _packed(64, 1, ends_on="npu"), NEVER),
)
