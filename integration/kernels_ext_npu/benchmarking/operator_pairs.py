"""What one thing costs by two calls of operators: by torch's, and by those that kernels take in its place.

Each pair is one whose difference lies behind the launches: in copies, casts and workspaces of CANN (docs/inside.md).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch_npu
from torch import Tensor

from kernels_ext_npu.benchmarking import call_costs
from kernels_ext_npu.benchmarking.measured_calls import Result
from kernels_ext_npu.benchmarking.options import DTYPES, OPERATORS
from kernels_ext_npu.benchmarking.providers import OURS
from kernels_ext_npu.environment import first_line
from kernels_ext_npu.measuring.distance import distance

NAME = "pairs"  # stands where other results have the name of a model
TORCH = "torch"
PROVIDERS = (TORCH, OURS)
# Both compute one formula: they differ by roundings to 16 bits, of which either has at most four.
_TOLERANCE = {torch.bfloat16: 8 * 2**-8, torch.float16: 8 * 2**-11}
Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Pair:
    """One thing that two calls compute.

    Attributes:
        name: what it is.
        shapes: those of its arguments; a size below 0 is divided where widths are shrunk, as on the software device.
        plain: what torch or transformers calls.
        ours: what kernels call.
        dtypes: those of the arguments, in their order: the one that is asked for where it is None.
        since: an operator of torch_npu that a release has to have for it.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    plain: Callable[..., Tensor]
    ours: Callable[..., Tensor]
    dtypes: tuple[torch.dtype | None, ...] = ()
    since: str = ""

    def arguments(self, dtype: torch.dtype, shrink: int) -> Tensors:
        """Draw the arguments on the NPU, the same each time."""
        generator = torch.Generator().manual_seed(0)
        dtypes = self.dtypes or (None,) * len(self.shapes)
        shapes = [[max(1, -size // shrink) if size < 0 else size for size in shape] for shape in self.shapes]
        drawn = (torch.randn(shape, generator=generator) / 8 for shape in shapes)
        return tuple(tensor.to("npu", own or dtype) for tensor, own in zip(drawn, dtypes))


def _place(cache: Tensor) -> Tensor:
    return torch.full((1,), cache.shape[2] - 1, device=cache.device)


def _latent_scores(query: Tensor, rotated: Tensor, latents: Tensor, keys: Tensor) -> Tensor:
    whole, cached = torch.cat((query, rotated), -1), torch.cat((latents, keys), -1)
    return torch.ops.npu.npu_fusion_attention(whole, cached, latents, query.shape[1], "BNSD", scale=0.04)[0]


def _latent_scores_apart(query: Tensor, rotated: Tensor, latents: Tensor, keys: Tensor) -> Tensor:
    return torch.ops.npu.npu_fused_infer_attention_score(
        query, latents, latents, query_rope=rotated, key_rope=keys, num_heads=query.shape[1], scale=0.04,
        input_layout="BNSD", num_key_value_heads=1,
    )[0]  # fmt: skip


def _scatter_words(logits: Tensor) -> Tensor:
    return logits.scatter_(1, torch.arange(len(logits), device=logits.device).unsqueeze(1), 0.0)


def _set_words(logits: Tensor) -> Tensor:
    """Set the word of each row whose place is that of the row."""
    rows, words = logits.shape
    places = torch.arange(0, rows * (words + 1), words + 1, device=logits.device).unsqueeze(1)
    torch.ops.npu.npu_scatter_nd_update_(logits.view(-1), places, logits.new_zeros(rows))
    return logits


def _head(hidden: Tensor, weight: Tensor) -> Tensor:
    labels = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
    found = torch.ops.npu.npu_fused_linear_online_max_sum(hidden, weight, labels, 0, len(weight) - 1)
    return found[0] + found[1].log()


F32 = torch.float32
PAIRS = (
    *(
        Pair(
            "a token into a static cache",
            ((-8, 8, -length, 128), (-8, 8, 1, 128)),
            lambda cache, token: cache.index_copy_(2, _place(cache), token),
            lambda cache, token: torch.ops.npu.scatter_update_(cache, _place(cache).expand(len(cache)), token, -2),
        )
        for length in (4096, 8192, 32768)
    ),
    Pair(
        "what an adapter of rank 16 adds",
        ((-4096, 4096), (-4096, 16), (16, 4096)),
        lambda total, left, right: total.addmm_(left, right, alpha=2.0),
        lambda total, left, right: total.add_(left @ right, alpha=2.0),
    ),
    Pair(
        "latent attention of one query",
        ((-8, 128, 1, 512), (-8, 128, 1, 64), (-8, 1, -8192, 512), (-8, 1, -8192, 64)),
        _latent_scores,
        _latent_scores_apart,
    ),
    Pair(
        "bfloat16 or float16 less float32",
        ((-2048, -32768), (-2048, 1)),
        torch.sub,
        lambda x, offset: torch.add(x, -offset),
        (None, F32),
    ),
    Pair(
        "a word of each row",
        ((-4096, -65536),),
        _scatter_words,
        _set_words,
    ),
    Pair(
        "sums of a head's exponentials",
        ((-4096, 4096), (-32768, 4096)),
        lambda hidden, weight: torch.logsumexp((hidden @ weight.T).float(), -1),
        _head,
        since="npu_fused_linear_online_max_sum",
    ),
    Pair(
        "float32 products added up",
        ((-512, 64, 128), (-512, 64, 64), (-512, 64, 128)),
        torch.baddbmm,
        lambda total, left, right: torch.bmm(left, right).add_(total),
        (F32, F32, F32),
    ),
    Pair(
        "sums of counts",
        ((1024,),),
        lambda counts: (8 * counts).long().cumsum(0).to(counts.dtype),
        lambda counts: (8 * counts).long().cumsum(0, dtype=torch.int32).to(counts.dtype),
    ),
)


def run(dtype_name: str, shrink: int, repeats: int) -> Iterator[Result]:
    """Compare, count and on a card time both calls of each pair, and give the result of each."""
    dtype: torch.dtype = getattr(torch, DTYPES[dtype_name])
    for pair in PAIRS:
        gc.collect()
        torch_npu.npu.empty_cache()
        shapes = [list(argument.shape) for argument in pair.arguments(dtype, shrink)]
        head = NAME, dtype_name, "alone", OPERATORS, pair.name, "", shapes
        calls = {TORCH: pair.plain, OURS: pair.ours}
        if pair.since and not hasattr(torch.ops.npu, pair.since):
            yield Result(*head, OURS, "forward", refused=f"this torch_npu has no {pair.since}")
            continue
        for provider, call in calls.items():
            yield _measured(Result(*head, provider, "forward"), pair, call, dtype, shrink, repeats)


def _measured(
    result: Result, pair: Pair, call: Callable[..., Tensor], dtype: torch.dtype, shrink: int, repeats: int
) -> Result:
    try:
        with torch.no_grad():
            found = call(*pair.arguments(dtype, shrink)).double()
            apart = distance(found, pair.plain(*pair.arguments(dtype, shrink)).double()).norm
            if not apart <= _TOLERANCE[dtype]:
                return replace(result, refused=f"differs from torch's by {apart:.1e}", wrong=True)
            given = pair.arguments(dtype, shrink)
            before, timed = (lambda: given), (lambda arguments: call(*arguments))
            figures = call_costs.count(before, timed) | call_costs.times(before, timed, repeats)
    except Exception as error:  # whatever an operator raises: the others go on
        refused = f"raised {type(error).__name__}: {first_line(error)}"
        return replace(result, refused=refused, wrong=True)
    return replace(result, distance=apart, figures=figures)
