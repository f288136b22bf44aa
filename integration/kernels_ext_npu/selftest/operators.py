"""Calls of operators alone of which sources say one thing and only a card can say whether it is so.

Most have a hidden pass or an output that a release leaves unwritten; docs/hardware.md has what each decides.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch_npu import npu

from kernels_ext_npu.selftest.functions.attention import attention, packed
from kernels_ext_npu.selftest.operator_call import NEVER, OperatorCall, Pair, deterministic, draw, launched

BF16, F32 = torch.bfloat16, torch.float32


def _sink_gradient(layout: str, dtype: torch.dtype = BF16, is_deterministic: bool = False) -> Pair:
    """Return the gradient of the sinks of two heads of 64, of seven tokens: two sequences in the layout TND."""
    shape = {"TND": (7, 2, 64), "BNSD": (1, 2, 7, 64), "BSND": (1, 7, 2, 64)}[layout]
    q, k, v, grad = (draw(*shape, seed=seed, dtype=dtype) for seed in range(4))
    sink, scale = draw(2, seed=4, dtype=F32), 0.125
    given = [tensor.to("npu").requires_grad_() for tensor in (q, k, v, sink)]
    mask = torch.ones(2048, 2048, dtype=torch.bool, device="npu").triu(1)
    ends = [3, 7] if layout == "TND" else None
    out = torch.ops.npu.npu_fusion_attention(
        *given[:3], 2, layout, None, None, mask, scale, 1.0, 2147483647, 0, 0, None, ends, ends, 3, sink=given[3]
    )[0]
    with deterministic(is_deterministic):
        out.backward(grad.to("npu"))
    exact_sink = sink.double().requires_grad_()
    q, k, v, grad = (tensor.double() for tensor in (q, k, v, grad))
    if layout == "BNSD":
        q, k, v, grad = (tensor.transpose(1, 2) for tensor in (q, k, v, grad))
    if layout == "TND":
        expected = packed(q, k, v, [3, 4], [3, 4], scale, causal=True, sinks=exact_sink)
    else:
        expected = attention(q, k, v, scale, causal=True, sinks=exact_sink)
    expected.backward(grad)
    assert given[3].grad is not None
    assert exact_sink.grad is not None
    return [given[3].grad], [exact_sink.grad]


def _latents(tokens: int, heads: int) -> Pair:
    """Decode one token of latent attention behind a cache whose latents and rotated parts lie apart."""
    parts = [draw(*shape, seed=i, dtype=BF16) for i, shape in enumerate(
        ((1, heads, 1, 512), (1, 1, tokens, 512), (1, heads, 1, 64), (1, 1, tokens, 64))
    )]  # fmt: skip
    q, k, q_rope, k_rope = (part.to("npu") for part in parts)
    found = torch.ops.npu.npu_fused_infer_attention_score(
        q, k, k, query_rope=q_rope, key_rope=k_rope, num_heads=heads, scale=0.04, input_layout="BNSD",
        num_key_value_heads=1,
    )[0]  # fmt: skip
    q, k, q_rope, k_rope = (part.double() for part in parts)
    scores = torch.cat((q, q_rope), -1) @ torch.cat((k, k_rope), -1).mT * 0.04
    return [found], [scores.softmax(-1) @ k]


def _added(operator: str) -> Pair:
    x, offset = draw(64, 256, dtype=BF16), draw(64, 1, seed=1, dtype=F32)
    given = x.to("npu"), offset.to("npu")
    found = torch.add(given[0], -given[1]) if operator == "add" else torch.sub(*given)
    return [found], [x.double() - offset.double()]


def _word_of_each_row() -> Pair:
    x, places = draw(64, 256, dtype=BF16), torch.arange(64) * 256 + torch.arange(64)
    found, expected = x.to("npu"), x.double()
    values = draw(64, seed=1, dtype=BF16)
    torch.ops.npu.npu_scatter_nd_update_(found.view(-1), places.unsqueeze(-1).to("npu"), values.to("npu"))
    expected.view(-1)[places] = values.double()
    return [found], [expected]


def _into_cache(operator: str, captured: bool = False) -> Pair:
    """Write one token of two rows into a cache of 256; in a graph its place changes before that is replayed."""
    cache, token, place = draw(2, 4, 256, 128, dtype=BF16), draw(2, 4, 1, 128, seed=1, dtype=BF16), torch.tensor([77])
    found, expected, given = cache.to("npu"), cache.double(), (token.to("npu"), place.to("npu"))

    def write(token: Tensor, place: Tensor) -> None:
        if operator == "index_copy_":
            found.index_copy_(2, place, token)
        elif operator == "scatter_update_":
            torch.ops.npu.scatter_update_(found, place.expand(2), token, -2)
        else:
            rows = torch.arange(0, 2 * 4 * 256, 256, device="npu").add_(place).unsqueeze(1)
            torch.ops.npu.npu_scatter_nd_update_(found.view(-1, 128), rows, token.view(-1, 128))

    if captured:
        graph = npu.NPUGraph()
        with npu.graph(graph):
            write(*given)
        given[1].fill_(78)
        graph.replay()
    else:
        write(*given)
    expected[:, :, 78 if captured else 77] = token.double()[:, :, 0]
    return [found], [expected]


def _summed_up(captured: bool) -> Pair:
    numbers = torch.arange(300)
    given = numbers.to("npu")
    return [launched(lambda: given.cumsum(0), captured).float()], [numbers.cumsum(0).double()]


def _head() -> Pair:
    """Return the largest logit of each row and the sum of the exponentials beside it."""
    x, weight = draw(64, 128, dtype=BF16), draw(512, 128, seed=1, dtype=BF16)
    labels = torch.zeros(64, dtype=torch.int64, device="npu")
    largest, total, *_ = torch.ops.npu.npu_fused_linear_online_max_sum(x.to("npu"), weight.to("npu"), labels, 0, 511)
    return [largest + total.log()], [(x.double() @ weight.double().T).logsumexp(-1)]


def _depthwise() -> Pair:
    leaves = draw(2, 64, 40, dtype=BF16), draw(64, 1, 4, seed=1, dtype=BF16)
    grad = draw(2, 64, 43, seed=2, dtype=BF16)

    def results(leaves: list[Tensor], g: Tensor) -> list[Tensor]:
        x, weight = (leaf.requires_grad_() for leaf in leaves)
        y = F.conv1d(x, weight, padding=3, groups=64)
        return [y.detach(), *torch.autograd.grad(y, (x, weight), g)]

    found = results([leaf.to("npu") for leaf in leaves], grad.to("npu"))
    return found, results([leaf.double() for leaf in leaves], grad.double())


def _captured_attention() -> Pair:
    parts = [draw(1, 2, 9, 64, seed=seed) for seed in range(3)]
    q, k, v = (part.to("npu") for part in parts)
    attend = torch.ops.npu.npu_fusion_attention
    out = launched(lambda: attend(q, k, v, 2, "BNSD", None, None, None, 0.125)[0], captured=True)
    q, k, v = (part.double().transpose(1, 2) for part in parts)
    return [out], [attention(q, k, v, 0.125).transpose(1, 2)]


def _gradients_by_log_sums() -> Pair:
    """Return the gradients of two packed sequences, of the logarithms of sums as maxima beside sums of one."""
    parts, ends = [draw(7, 2, 64, seed=seed) for seed in range(4)], torch.tensor([3, 7])
    *given, grad = (part.to("npu") for part in parts)
    options = {"actual_seq_qlen": ends, "actual_seq_kvlen": ends, "softmax_layout": "TND"}
    out, maxima, sums, *_ = torch.ops.npu.npu_fusion_attention_v3(*given, 2, "TND", scale=0.125, **options)
    statistics = {"softmax_max": maxima + sums.log(), "softmax_sum": torch.ones_like(sums), "attention_in": out}
    fused = torch.ops.npu.npu_fusion_attention_grad_v3
    found = fused(*given, grad, 2, "TND", scale_value=0.125, **statistics, **options)[:3]
    q, k, v = (part.double().requires_grad_() for part in parts[:3])
    expected = packed(q, k, v, [3, 4], [3, 4], 0.125)
    return list(found), list(torch.autograd.grad(expected, (q, k, v), parts[3].double()))


def _same_sums_twice() -> Pair:
    """Add 4,096 rows up in 16 places twice, under determinism: whether both sums are the same, bit for bit."""
    rows, places = draw(4096, 64, dtype=F32).to("npu"), (torch.arange(4096) % 16).to("npu")
    with deterministic(True):
        one, other = (torch.zeros(16, 64, device="npu").index_add_(0, places, rows) for _ in range(2))
    return [(one == other).float()], [torch.ones(16, 64, dtype=torch.float64)]


def _counted_ids() -> Pair:
    ids = torch.arange(262_144) % 128
    return [torch.histc(ids.to("npu"), 128, 0, 127).float()], [ids.bincount(minlength=128).double()]


def _indexed_behind_empty_sequences() -> Pair:
    """Choose all four keys for the only query, that of the last of 300 sequences."""
    query, key, weights = draw(1, 16, 128), draw(1200, 1, 128, seed=1), draw(1, 16, seed=2).abs()
    ends = torch.zeros(300, dtype=torch.int32)
    ends[-1] = 1
    lengths = {"query": ends, "key": 4 * torch.arange(1, 301, dtype=torch.int32)}
    found, _ = torch.ops.npu.npu_lightning_indexer(
        *(tensor.to("npu") for tensor in (query, key, weights)),
        **{f"actual_seq_lengths_{side}": each.to("npu") for side, each in lengths.items()},
        layout_query="TND",
        layout_key="TND",
        sparse_count=4,
    )
    return [found.flatten().sort().values.float()], [torch.arange(4, dtype=torch.float64)]


OPERATORS = (
    OperatorCall("gradient of a sink, TND", lambda: _sink_gradient("TND"), (8, 5), BF16),
    OperatorCall("gradient of a sink, BSND", lambda: _sink_gradient("BSND"), (8, 5), BF16),
    *(
        OperatorCall(
            f"gradient of a sink, {layout}, deterministic",
            partial(_sink_gradient, layout, is_deterministic=True),
            (8, 5),
            BF16,
            unwritten_since=unwritten,
        )
        for layout, unwritten in {"TND": (8, 5), "BNSD": (9, 0), "BSND": NEVER}.items()
    ),
    OperatorCall("gradient of a sink, BSND", lambda: _sink_gradient("BSND", F32), NEVER, F32),
    OperatorCall("latent attention, one query behind 600 keys", lambda: _latents(600, 8), (8, 5), BF16),
    OperatorCall("add of bfloat16 and float32", lambda: _added("add"), dtype=F32),
    OperatorCall("sub of bfloat16 and float32", lambda: _added("sub"), dtype=F32),
    OperatorCall("npu_scatter_nd_update_, a word of each row", _word_of_each_row, dtype=BF16),
    OperatorCall("index_copy_, a token", lambda: _into_cache("index_copy_"), dtype=BF16),
    OperatorCall("scatter_update_, a token", lambda: _into_cache("scatter_update_"), dtype=BF16),
    *(
        OperatorCall(f"{operator}, a token, captured", partial(_into_cache, operator, captured=True), dtype=BF16)
        for operator in ("scatter_update_", "npu_scatter_nd_update_")
    ),
    OperatorCall("cumsum of int64", lambda: _summed_up(captured=False), dtype=F32),
    OperatorCall("cumsum of int64, captured", lambda: _summed_up(captured=True), dtype=F32),
    OperatorCall("npu_fused_linear_online_max_sum", _head, (9, 1), BF16),
    OperatorCall("conv1d of each channel alone", _depthwise, dtype=BF16),
    OperatorCall("npu_fusion_attention, captured", _captured_attention),
    *(
        [OperatorCall("npu_fusion_attention_grad_v3, log sums", _gradients_by_log_sums)]
        if hasattr(torch.ops.npu, "npu_fusion_attention_grad_v3")
        else []
    ),
    OperatorCall("index_add_ twice, deterministic", _same_sums_twice, dtype=F32),
    OperatorCall("histc of 262,144 ids", _counted_ids, dtype=F32),
    OperatorCall("npu_lightning_indexer, 299 empty sequences", _indexed_behind_empty_sequences, (8, 5)),
)
