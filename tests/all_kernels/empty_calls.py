"""Calls of functions of the kernels with empty tensors, and their formulas: without rows, tokens or sequences."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels_ext_npu.selftest.functions import attention, experts, linear_layers, losses, norms, rotary
from tests.all_kernels.differentiated import experts as all_experts
from tests.all_kernels.differentiated import our_experts

H, WORDS = 32, 40
# where sequences of queries and of keys end, and how many there are
PACKS = ([0], [0], 0, 0), ([0, 0], [0, 0], 0, 0), ([0], [0], 5, 5), ([0, 0, 0], [0, 0, 7], 0, 7)
_ATTENTION = partial(attention.attention, scale=0.25)
WITHOUT_GRADIENTS = {"attention_mask", "top_k_keys", "lora_pair"}  # masks, integers, and what computes nothing then


@dataclass(frozen=True)
class Case:
    """Hold how a function is called of empty tensors, its formula, and the shapes of the tensors."""

    name: str
    call: Callable
    formula: Callable
    shapes: tuple[tuple[int, ...], ...]


def empty_result(*tensors: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return an empty tensor that depends on others, as the loop over tokens of a recurrence has none to stack."""
    return sum(tensor.sum() for tensor in tensors) * tensors[0].new_empty(shape)


def labels(x: Tensor) -> Tensor:
    return torch.empty(x.shape[:-1], dtype=torch.long, device=x.device)


def norm_cases(rows: tuple[int, ...]) -> list[Case]:
    def added(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return norms.rms_norm(x + r, w), x + r

    def call(f: Callable, *t: Tensor) -> Tensor:
        return f(*t, norms.EPS)

    x, w = (*rows, H), (H,)
    return [
        Case("rms_norm", call, norms.rms_norm, (x, w)),
        Case("zero_centered_rms_norm", call, lambda x, w: norms.rms_norm(x, 1 + w), (x, w)),
        Case("add_rms_norm", call, added, (x, x, w)),
        Case("layer_norm", call, norms.layer_norm, (x, w, w)),
        Case("add_layer_norm", call, lambda x, r, w, b: norms.layer_norm(x + r, w, b), (x, x, w, w)),
        Case(
            "hyper_connection",
            lambda f, *t: f(*t, norms.EPS, norms.EPS, norms.ROUNDS),
            norms.hyper_connection,
            ((*rows, 4, H), (24, 4 * H), (24,), (3,)),
        ),
        Case("swiglu", lambda f, x: f(x), norms.gated(F.silu), (x,)),
        Case("swiglu", lambda f, a, b: f(a, b), lambda a, b: F.silu(a) * b, (x, x)),
        Case("geglu", lambda f, x: f(x), norms.gated(norms.gelu_tanh), (x,)),
        Case("clamped_swiglu", lambda f, x: f(x, limit=norms.LIMIT), norms.clamped_swiglu, (x,)),
        Case("clipped_swiglu", lambda f, x: f(x), norms.clipped_swiglu, (x,)),
        Case("gelu_tanh", lambda f, x: f(x), norms.gelu_tanh, (x,)),
        Case("quick_gelu", lambda f, x: f(x), norms.quick_gelu, (x,)),
    ]


def rotary_cases(batch: int, positions: int) -> list[Case]:
    q, k, table = (batch, 4, positions, 16), (batch, 2, positions, 16), (batch, positions, 16)
    one = (batch, 1, positions, 16)
    return [
        Case("rotary_mul", lambda f, *t: f(*t), rotary.rotated, (q, one, one)),
        Case("rotary_mul", lambda f, *t: f(*t, True), rotary.rotated_pairs, (q, one, one)),
        Case("apply_rotary_pos_emb", lambda f, *t: f(*t), rotary.both_rotated, (q, k, table, table)),
        Case(
            "apply_multimodal_rotary_pos_emb",
            lambda f, *t: f(*t, rotary.SECTION),
            rotary.multimodal,
            (q, k, (3, *table), (3, *table)),
        ),
    ]


def expert_cases() -> list[Case]:
    def counts(x: Tensor) -> Tensor:
        return torch.zeros(4, dtype=torch.long, device=x.device)

    product = partial(experts._product, counts=torch.zeros(4, dtype=torch.long))
    stacked = (0, H), (4, H, 16), (4, 16)
    mixture = (0, H), (0, 2), (4, 32, H), (4, H, 16)
    return [
        Case("grouped_matmul", lambda f, x, w, b: f(x, w, counts(x), b), product, stacked),
        Case("GmmFunction", lambda f, x, w, b: f.apply(x, w, counts(x), b, None), product, stacked),
        Case(
            "HybridGmmFunction",
            lambda f, x, *w: f.apply(x, counts(x), None, False, *w),
            lambda x, *w: torch.cat([x @ each.mT for each in w]),
            ((0, H), *[(16, H)] * 4),
        ),
        Case("fused_experts", lambda f, *t: our_experts(*t), all_experts, mixture),
        Case("fused_experts", lambda f, *t: our_experts(*t), all_experts, (*mixture, (4, 32), (4, H))),
        Case("fused_experts", lambda f, *t: our_experts(*t, present=3), partial(all_experts, present=3), mixture),
        Case(
            "experts_forward",
            lambda f, x, w, *t: experts._run_experts(f, x, torch.empty_like(w, dtype=torch.long), w, *t),
            all_experts,
            ((0, experts.HIDDEN), (0, 2), (4, 2 * experts.INNER, experts.HIDDEN), (4, experts.HIDDEN, experts.INNER)),
        ),
        Case("float32_logits", lambda f, x, w: f(x, w), lambda x, w: x @ w.mT, ((0, H), (4, H))),
        Case("softmax_top_k", lambda f, x: f(x, 2, True)[0], partial(experts._top_k, choices=2), ((0, 4),)),
        Case(
            "gating_top_k",
            lambda f, x, b: f(x, 2, b, groups=2, scale=2.5)[0],
            lambda x, b: 2.5 * x.sigmoid()[:, :2],
            ((0, 8), (8,)),
        ),
    ]


def attention_cases() -> list[Case]:
    batched_calls = {
        "plain": lambda f, *t: f(*t, softmax_scale=0.25),
        "deterministic": lambda f, *t: f(*t, softmax_scale=0.25, deterministic=True),
        "sinks": lambda f, q, k, v, s: f(q, k, v, softmax_scale=0.25, s_aux=s),
    }
    found = []
    for rows, queries, keys in ((0, 9, 9), (2, 0, 9), (2, 0, 0), (2, 9, 0)):
        shapes = (rows, queries, 4, 16), *[(rows, keys, 2, 16)] * 2
        for options, call in batched_calls.items():
            sinks = options == "sinks"
            exact = (lambda q, k, v, s: attention.attention(q, k, v, 0.25, sinks=s)) if sinks else _ATTENTION
            found.append(Case("flash_attn_func", call, exact, (*shapes, *[(4,)] * sinks)))
    for rows, tokens in ((0, 9), (2, 0)):
        shapes = (rows, tokens, 4, 16), *[(rows, tokens, 2, 16)] * 2
        found.append(Case("attention_forward", attention._attend, attention._causal, shapes))
    for rows, queries in ((0, 9), (1, 0)):
        shapes = (rows, queries, 4, 576), (rows, 13, 512), (rows, 13, 64)
        found.append(Case("attend_chosen", attention._to_chosen, attention._exact_to_chosen, shapes))
        shapes = (rows, queries, 32, 576), (rows, 13, 1, 576), (rows, queries, 8, 128), (rows, 13, 128)
        shapes += ((rows, queries, 8),)
        found.append(Case("indexer_loss", attention._indexer_loss, attention._exact_indexer_loss, shapes))
    return found


def packed_attention_cases(ends: list[int], key_ends: list[int], tokens: int, keys: int) -> list[Case]:
    """No query sees a key."""

    def zeros(q: Tensor, *others: Tensor) -> Tensor:
        return 0 * q + 0 * sum(x.sum() for x in others)

    def by_tensors(f: Callable, *t: Tensor) -> Tensor:
        return f(*t, *(torch.tensor(each, device=t[0].device) for each in (ends, key_ends)), causal=True)

    calls: list[Callable] = [
        lambda f, *t: f(*t, ends, key_ends),
        lambda f, *t: f(*t, ends, key_ends, deterministic=True),
        lambda f, *t: f(*t, ends, key_ends, softcap=3.0),
        by_tensors,
    ]
    shapes = (tokens, 4, 16), (keys, 2, 16), (keys, 2, 16)
    with_sinks = Case(
        "flash_attn_varlen_func", lambda f, q, k, v, s: f(q, k, v, ends, key_ends, s_aux=s), zeros, (*shapes, (4,))
    )
    return [*(Case("flash_attn_varlen_func", call, zeros, shapes) for call in calls), with_sinks]


def loss_cases(reduction: str) -> list[Case]:
    hidden, head = (0, H), ((WORDS, H), (WORDS,))

    def linear_loss(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, w, b), labels(h), reduction=reduction)

    jsd = "batchmean" if reduction == "mean" else reduction

    def divergence(*tensors: Tensor) -> Tensor:
        rows = losses._jsd(*tensors)
        return rows if reduction == "none" else rows.sum()

    return [
        Case(
            "cross_entropy",
            lambda f, x: f(x, labels(x), reduction=reduction),
            lambda x: F.cross_entropy(x, labels(x), reduction=reduction),
            ((0, WORDS),),
        ),
        *(
            Case(
                "linear_cross_entropy",
                partial(lambda f, h, w, b, n: f(h, w, labels(h), b, reduction=reduction, pieces=n), n=pieces),
                linear_loss,
                (hidden, *head),
            )
            for pieces in (None, 2)
        ),
        Case(
            "linear_generalized_jsd",
            lambda f, h, w, b, t, v: f(h, w, t, v, None, b, reduction=jsd),
            divergence,
            (hidden, *head, (0, 2 * H), (WORDS, 2 * H)),
        ),
    ]


def log_prob_cases(rows: tuple[int, ...]) -> list[Case]:
    def log_probs(h: Tensor, w: Tensor, *bias: Tensor) -> Tensor:
        return F.log_softmax(F.linear(h, w, *bias), -1).gather(-1, labels(h)[..., None])[..., 0]

    def entropy(h: Tensor, w: Tensor, *bias: Tensor) -> Tensor:
        found = F.log_softmax(F.linear(h, w, *bias), -1)
        return -(found.exp() * found).sum(-1)

    shapes = (*rows, H), (WORDS, H), (WORDS,)
    return [
        Case("linear_log_probs", lambda f, h, w, b: f(h, w, labels(h), b), log_probs, shapes),
        Case(
            "linear_log_probs_and_entropy",
            lambda f, h, w, b: f(h, w, labels(h), b),
            lambda *t: (log_probs(*t), entropy(*t)),
            shapes,
        ),
    ]


def linear_cases(rows: tuple[int, ...]) -> list[Case]:
    found = (case for case in linear_layers._functions("", rows) if case.name not in WITHOUT_GRADIENTS)
    return [Case(case.name, case.call, case.exact, tuple(t.shape for t in case.arguments())) for case in found]


def delta_cases(batch: int, tokens: int, heads: int = 2) -> list[Case]:
    def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return empty_result(q, k, v, g, beta, state, shape=v.shape), state + 0 * sum(
            x.sum() for x in (q, k, v, g, beta)
        )

    def call(f: Callable, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        *given, state = tensors
        return f(*given, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)

    of_heads, each = (batch, tokens, heads, 8), (batch, tokens, heads)
    shapes = ((batch, tokens, 2, 8),) * 2 + (of_heads,)
    state = (batch, heads, 8, 8)
    return [
        Case(name, call, rule, (*shapes, of_heads if "kda" in name else each, each, state))
        for name in ("chunk_gated_delta_rule", "chunk_kda", "fused_recurrent_gated_delta_rule", "fused_recurrent_kda")
        if heads == 2 or "kda" not in name
    ]


def packed_delta_case(ends: list[int]) -> Case:
    def call(f: Callable, *tensors: Tensor) -> Tensor:
        return f(*tensors, cu_seqlens=torch.tensor(ends, device=tensors[0].device))[0]

    shapes = *[(1, 0, 2, 8)] * 3, (1, 0, 2), (1, 0, 2)
    return Case("chunk_gated_delta_rule", call, lambda *t: empty_result(*t, shape=t[2].shape), shapes)


def recurrence_cases(batch: int, tokens: int) -> list[Case]:
    def convolved(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return empty_result(x, weight, bias, shape=x.shape)

    def scanned(u: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        return empty_result(u, *others, shape=u.shape), 0 * sum(x.sum() for x in (u, *others)) + u.new_zeros(
            batch, 8, 4
        )

    def recurred(decays: Tensor, added: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return empty_result(decays, added, state, shape=added.shape), state + 0 * (decays.sum() + added.sum())

    x, b = (batch, 8, tokens), (batch, 4, tokens)
    return [
        Case("causal_conv1d_fn", lambda f, *t: f(*t, "silu"), convolved, (x, (8, 4), (8,))),
        Case(
            "causal_conv1d_update",
            lambda f, x, w, b: f(x, x.new_zeros(batch, 8, 4), w, b, "silu"),
            convolved,
            (x, (8, 4), (8,)),
        ),
        Case(
            "selective_scan_fn",
            lambda f, *t: f(*t, delta_softplus=True, return_last_state=True),
            scanned,
            (x, x, (8, 4), b, b, (8,), x, (8,)),
        ),
        Case("linear_recurrence", lambda f, *t: f(*t), recurred, (*[(batch, tokens, 8)] * 2, (batch, 8))),
    ]


CASES = [
    *(
        case
        for rows in ((0,), (2, 0), (0, 3))
        for case in (*norm_cases(rows), *linear_cases(rows), *log_prob_cases(rows))
    ),
    *(case for sizes in ((0, 6), (2, 0)) for case in rotary_cases(*sizes)),
    *expert_cases(),
    *attention_cases(),
    *(case for pack in PACKS for case in packed_attention_cases(*pack)),
    *(case for reduction in ("none", "sum", "mean") for case in loss_cases(reduction)),
    Case(
        "patch_embedding", lambda f, *t: f(*t), partial(F.conv2d, stride=(4, 3)), ((0, 3, 9, 7), (16, 3, 4, 3), (16,))
    ),
    *(case for sizes in ((0, 7), (0, 1), (2, 0), (2, 7, 0)) for case in delta_cases(*sizes)),
    *map(packed_delta_case, ([0], [0, 0])),
    *(case for sizes in ((0, 7), (0, 1), (2, 0)) for case in recurrence_cases(*sizes)),
]
