"""Functions of the kernels beside their formulas, for tests of what torch's autograd promises of any function."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from kernels import get_local_kernel
from torch import Tensor
from torch.nn import functional as F

ROOT = Path(__file__).parents[2]
T, H, INNER, E, K = 6, 32, 16, 4, 2  # tokens, hidden and inner size, experts, choices
INDEX = torch.tensor([[0, 1], [3, 1], [2, 0], [1, 3], [3, 0], [1, 0]])
LIMIT = 0.75  # of the clipped SwiGLU: some values are beyond it


class Case(NamedTuple):
    """Hold a function of a kernel, and what it computes.

    Attributes:
        ours: takes tensors on the NPU.
        formula: takes tensors on the CPU, in float64.
        shapes: of the tensors.
        is_node: whether it is a node of autograd, which torch.func and forward derivatives do not take.
    """

    ours: Callable[..., Tensor]
    formula: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    is_node: bool = False

    def inputs(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Draw tensors on the CPU, with values that the dtype has."""
        generator = torch.Generator().manual_seed(len(self.shapes))
        return [(torch.randn(shape, generator=generator) / 2).to(dtype) for shape in self.shapes]


@cache
def kernel(repository: str) -> ModuleType:
    return get_local_kernel(ROOT / repository)


def rms_norm(x: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, 1e-6)


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def geglu(gate_up: Tensor, approximate: str = "tanh") -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate=approximate) * up


def clamped(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT)


def clipped(gate_up: Tensor, interleaved: bool) -> Tensor:
    gate, up = (gate_up[..., ::2], gate_up[..., 1::2]) if interleaved else gate_up.chunk(2, -1)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def table(like: Tensor, positions: int, size: int) -> tuple[Tensor, Tensor]:
    """Make cos and sin whose halves differ, so that a gradient that confuses them is seen."""
    angles = torch.arange(positions * size, dtype=torch.float64).view(1, positions, size) / 7
    return angles.cos().to(like), angles.sin().to(like)


def turned(x: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def rotated(x: Tensor, interleaved: bool = False) -> Tensor:
    cos, sin = (t.unsqueeze(1) for t in table(x, x.shape[-2], x.shape[-1]))
    return x * cos + turned(x, interleaved) * sin


def rotate_one(x: Tensor, interleaved: bool) -> Tensor:
    cos, sin = (t.unsqueeze(1) for t in table(x, x.shape[-2], x.shape[-1]))
    return kernel("RoPE").rotary_mul(x, cos, sin, interleaved)


def rotate_both(q: Tensor, k: Tensor) -> Tensor:
    """q and k as projections give them: views of ``[B, S, N, D]``."""
    q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    return torch.cat(kernel("RoPE").apply_rotary_pos_emb(q, k, *table(q, q.shape[-2], q.shape[-1])), 1)


def both_rotated(q: Tensor, k: Tensor) -> Tensor:
    return torch.cat((rotated(q), rotated(k)), 1)


def products(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Multiply the first two rows with the first matrix, the next three with the second, the last with the fourth."""
    group = torch.tensor([0, 0, 1, 1, 1, 3])
    return torch.einsum("th,thn->tn", x, weight[group]) + bias[group]


def our_products(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return kernel("FusedMoE").grouped_matmul(x, weight, torch.tensor([2, 3, 0, 1], device=x.device), bias)


def our_listed_products(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    counts = torch.tensor([2, 3, 0, 1], device=x.device)
    return kernel("FusedMoE").HybridGmmFunction.apply(x, counts, None, True, *weight.mT.contiguous(), *bias)


def experts(
    x: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *biases: Tensor,
    gate: Callable[[Tensor], Tensor] = swiglu,
    norm: Callable[[Tensor], Tensor] | None = None,
    present: int = E,
) -> Tensor:
    """Compute every expert for every token, and take what is chosen and present."""
    rows = torch.einsum("th,enh->etn", x, gate_up)
    rows = gate(rows + biases[0].unsqueeze(1) if biases else rows)
    rows = torch.einsum("eti,ehi->eth", rows, down)
    rows = rows + biases[1].unsqueeze(1) if biases else rows
    rows = rows if norm is None else norm(rows)
    index = INDEX[: x.shape[0]].to(x.device)
    one_hot = (index.unsqueeze(-1) == torch.arange(E, device=x.device)).to(x.dtype)[..., :present]
    return torch.einsum("tk,tke,eth->th", weights, one_hot, rows[:present])


def our_experts(
    x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *biases: Tensor, present: int = E, **options
) -> Tensor:
    index = INDEX[: x.shape[0]].to(x.device)
    parameters = [parameter[:present] for parameter in (gate_up, down, *biases)]
    fused = kernel("FusedMoE").fused_experts
    return fused(x, index.clamp(max=present), weights, *parameters, is_expert_parallel=present < E, **options)


def our_clipped_experts(*tensors: Tensor) -> Tensor:
    return our_experts(*tensors, activation=kernel("FusedMoE").Gate(1.702, LIMIT, 1.0, True))


def our_listed_experts(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, is_packed: bool) -> Tensor:
    blocks = kernel("FusedMoE").blocks
    both = gate_up.contiguous()  # an expert's gate and up lie side by side
    gates, ups, downs = (
        list(part) for part in ((e[:INNER] for e in both), (e[INNER:] for e in both), down.contiguous())
    )
    listed = blocks.ListedExperts(gates, ups, downs, (False,) * 3, is_packed, is_packed, F.silu)
    return blocks.fused_listed_experts(listed, x, INDEX.to(x.device), weights)


def softmax_top_k(logits: Tensor, renormalise: bool) -> Tensor:
    weights = torch.softmax(logits, -1).topk(K, -1).values
    return weights / weights.sum(-1, keepdim=True) if renormalise else weights


def our_softmax_top_k(logits: Tensor, renormalise: bool) -> Tensor:
    return kernel("FusedMoE").softmax_top_k(logits, K, renormalise)[0]


def routed(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Let tokens choose their experts, by which they are weighed."""
    weights, index = torch.softmax(x @ router, -1).topk(K, -1)
    rows = swiglu(torch.einsum("th,enh->etn", x, gate_up))
    one_hot = (index.unsqueeze(-1) == torch.arange(E, device=x.device)).to(x.dtype)
    weights = weights / weights.sum(-1, keepdim=True)
    return torch.einsum("tk,tke,eth->th", weights, one_hot, torch.einsum("eti,ehi->eth", rows, down))


def our_routed(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    moe = kernel("FusedMoE")
    weights, index = moe.softmax_top_k(x.mm(router), K)
    return moe.fused_experts(x, index, weights, gate_up, down)


TOKENS, MATRICES = (T, H), ((E, 2 * INNER, H), (E, H, INNER))
MIXTURE = (TOKENS, (T, K), *MATRICES)
CASES: dict[str, Case] = {
    "rms_norm": Case(lambda x, w: kernel("RMSNorm").rms_norm(x, w, 1e-6), rms_norm, (TOKENS, (H,))),
    "rms_norm without weight": Case(lambda x: kernel("RMSNorm").rms_norm(x, None, 1e-6), rms_norm, (TOKENS,)),
    "add_rms_norm": Case(
        lambda x, r, w: kernel("RMSNorm").add_rms_norm(x, r, w, 1e-6)[0],
        lambda x, r, w: rms_norm(x + r, w),
        (TOKENS, TOKENS, (H,)),
    ),
    "layer_norm": Case(lambda x, w: kernel("RMSNorm").layer_norm(x, w, None, 1e-6), layer_norm, (TOKENS, (H,))),
    "add_layer_norm": Case(
        lambda x, r, w, b: kernel("RMSNorm").add_layer_norm(x, r, w, b, 1e-6),
        lambda x, r, w, b: layer_norm(x + r, w, b),
        (TOKENS, TOKENS, (H,), (H,)),
    ),
    "swiglu": Case(lambda x: kernel("SwiGLU").swiglu(x), swiglu, (TOKENS,)),
    "swiglu of two": Case(lambda a, b: kernel("SwiGLU").swiglu(a, b), lambda a, b: F.silu(a) * b, (TOKENS, TOKENS)),
    "geglu": Case(lambda x: kernel("SwiGLU").geglu(x), geglu, (TOKENS,)),
    "geglu, exact": Case(
        lambda x: kernel("SwiGLU").geglu(x, approximate="none"), partial(geglu, approximate="none"), (TOKENS,)
    ),
    "clamped_swiglu": Case(lambda x: kernel("SwiGLU").clamped_swiglu(x, limit=LIMIT), clamped, (TOKENS,)),
    "clipped_swiglu": Case(
        lambda x: kernel("SwiGLU").clipped_swiglu(x, limit=LIMIT), partial(clipped, interleaved=True), (TOKENS,)
    ),
    "gelu_tanh": Case(lambda x: kernel("Activation").gelu_tanh(x), lambda x: F.gelu(x, approximate="tanh"), (TOKENS,)),
    "quick_gelu": Case(lambda x: kernel("Activation").quick_gelu(x), lambda x: x * torch.sigmoid(1.702 * x), (TOKENS,)),
    "rotary_mul": Case(partial(rotate_one, interleaved=False), rotated, ((2, 3, 4, H),)),
    "rotary_mul, interleaved": Case(
        partial(rotate_one, interleaved=True), partial(rotated, interleaved=True), ((2, 3, 4, H),)
    ),
    "apply_rotary_pos_emb": Case(rotate_both, both_rotated, ((2, 3, 4, H), (2, 2, 4, H))),
    "grouped_matmul": Case(our_products, products, (TOKENS, (E, H, INNER), (E, INNER))),
    "HybridGmmFunction": Case(our_listed_products, products, (TOKENS, (E, H, INNER), (E, INNER)), is_node=True),
    "fused_experts": Case(our_experts, experts, MIXTURE),
    "fused_experts, some elsewhere": Case(partial(our_experts, present=3), partial(experts, present=3), MIXTURE),
    "fused_experts, clipped": Case(
        our_clipped_experts,
        partial(experts, gate=partial(clipped, interleaved=True)),
        (*MIXTURE, (E, 2 * INNER), (E, H)),
    ),
    "fused_experts, normed": Case(
        partial(our_experts, post_expert_norm=rms_norm), partial(experts, norm=rms_norm), MIXTURE
    ),
    "fused_experts, GeGLU": Case(partial(our_experts, activation=geglu), partial(experts, gate=geglu), MIXTURE),
    "routed experts": Case(our_routed, routed, (TOKENS, (H, E), *MATRICES)),
    "listed experts": Case(partial(our_listed_experts, is_packed=True), experts, MIXTURE, is_node=True),
    "listed experts, two products": Case(partial(our_listed_experts, is_packed=False), experts, MIXTURE, is_node=True),
    "softmax_top_k": Case(
        partial(our_softmax_top_k, renormalise=True), partial(softmax_top_k, renormalise=True), ((T, 8),)
    ),
    "softmax_top_k, as it is": Case(
        partial(our_softmax_top_k, renormalise=False), partial(softmax_top_k, renormalise=False), ((T, 8),)
    ),
}
