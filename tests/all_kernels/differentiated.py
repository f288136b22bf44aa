"""Functions of the kernels beside their formulas, for tests of what torch's autograd promises of any function."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels_ext_npu.measuring.distance import tensors
from kernels_ext_npu.selftest import functions
from kernels_ext_npu.selftest.cases import Function
from kernels_ext_npu.selftest.functions.norms import gated, gelu_tanh
from tests.support.local_kernels import kernel

T, H, INNER, E, K = 6, 32, 16, 4, 2  # tokens, hidden and inner size, experts, choices
INDEX = torch.tensor([[0, 1], [3, 1], [2, 0], [1, 3], [3, 0], [1, 0]])
LIMIT = 0.75  # of the clipped SwiGLU: some values are beyond it


class Case(NamedTuple):
    """Hold a function of a kernel, of tensors on the NPU, and its formula, of those on the CPU in float64.

    A node of autograd is what torch.func and forward derivatives do not take.
    """

    ours: Callable[..., Tensor]
    formula: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    is_node: bool = False

    def inputs(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Draw tensors on the CPU, with values that the dtype has."""
        generator = torch.Generator().manual_seed(len(self.shapes))
        return [(torch.randn(shape, generator=generator) / 2).to(dtype) for shape in self.shapes]


# functions of the selftest whose formulas torch.func takes, too: their numbers of tokens are no matter of limits here
SIMPLE = {
    *("rms_norm", "zero_centered_rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm", "swiglu", "geglu"),
    *("clamped_swiglu", "clipped_swiglu", "gelu_tanh", "quick_gelu", "rotary_mul", "apply_rotary_pos_emb"),
    *("apply_multimodal_rotary_pos_emb", "float32_logits", "softmax_top_k", "cross_entropy", "linear_cross_entropy"),
    *("linear_log_probs_and_entropy", "patch_embedding", "grouped_matmul", "HybridGmmFunction"),
}


def is_simple(function: Function) -> bool:
    few_streams = function.title == "hyper_connection, one token"
    return few_streams or (function.name in SIMPLE and function.at in ("", "neighbours"))


def selftest_cases(function: Function) -> Case:
    def joined(found: object) -> Tensor:
        return torch.cat([tensor.flatten() for tensor in tensors(found)])

    return Case(
        lambda *xs: joined(function.call(getattr(kernel(function.repository), function.name), *xs)),
        lambda *xs: joined(function.exact(*xs)),
        tuple(tuple(tensor.shape) for tensor in function.arguments()),
        is_node=function.name.endswith("Function"),
    )


swiglu = gated(F.silu)


def normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def clipped(gate_up: Tensor, interleaved: bool) -> Tensor:
    gate, up = (gate_up[..., ::2], gate_up[..., 1::2]) if interleaved else gate_up.chunk(2, -1)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


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
    expert_lists = kernel("FusedMoE").expert_lists
    both = gate_up.contiguous()  # an expert's gate and up lie side by side
    gates, ups, downs = (
        list(part) for part in ((e[:INNER] for e in both), (e[INNER:] for e in both), down.contiguous())
    )
    listed = expert_lists.ListedExperts(gates, ups, downs, (False,) * 3, is_packed, is_packed, F.silu)
    return expert_lists.fused_listed_experts(listed, x, INDEX.to(x.device), weights)


def our_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return kernel("FlashAttention").flash_attn_func(q, k, v, causal=True)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention of ``[B, S, N, D]``, where two heads of q share one of k and v."""
    k, v = (x.repeat_interleave(2, 2) for x in (k, v))
    behind = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
    scores = torch.einsum("bqnd,bknd->bnqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bnqk,bknd->bqnd", scores.masked_fill(behind, -torch.inf).softmax(-1), v)


TOKENS, MATRICES = (T, H), ((E, 2 * INNER, H), (E, H, INNER))
MIXTURE = (TOKENS, (T, K), *MATRICES)
CASES: dict[str, Case] = {
    **{function.title: selftest_cases(function) for function in functions.FUNCTIONS if is_simple(function)},
    "rms_norm without weight": Case(
        lambda x: kernel("RMSNorm").rms_norm(x, None, 1e-6), lambda x: F.rms_norm(x, (H,), None, 1e-6), (TOKENS,)
    ),
    "swiglu of two": Case(lambda a, b: kernel("SwiGLU").swiglu(a, b), lambda a, b: F.silu(a) * b, (TOKENS, TOKENS)),
    "geglu, exact": Case(lambda x: kernel("SwiGLU").geglu(x, approximate="none"), gated(F.gelu), (TOKENS,)),
    "fused_experts": Case(our_experts, experts, MIXTURE),
    "fused_experts, some elsewhere": Case(partial(our_experts, present=3), partial(experts, present=3), MIXTURE),
    "fused_experts, clipped": Case(
        our_clipped_experts,
        partial(experts, gate=partial(clipped, interleaved=True)),
        (*MIXTURE, (E, 2 * INNER), (E, H)),
    ),
    "fused_experts, normed": Case(
        partial(our_experts, post_expert_norm=normed), partial(experts, norm=normed), MIXTURE
    ),
    "fused_experts, GeGLU": Case(
        partial(our_experts, activation=gated(gelu_tanh)), partial(experts, gate=gated(gelu_tanh)), MIXTURE
    ),
    "attention": Case(our_attention, attention, ((2, 5, 4, 8), (2, 5, 2, 8), (2, 5, 2, 8))),
    "listed experts": Case(partial(our_listed_experts, is_packed=True), experts, MIXTURE, is_node=True),
    "listed experts, two products": Case(partial(our_listed_experts, is_packed=False), experts, MIXTURE, is_node=True),
}
