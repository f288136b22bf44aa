"""Every function of the kernels, forward and backward, in every dtype, against float64."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from tests.support import attention_truth, delta_rule_truth, experts_classes, proofs

TOKENS, HIDDEN, INNER, EXPERTS, CHOICES = 12, 32, 48, 4, 2
COUNTS = torch.tensor([5, 0, 4, 3])


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return rms_norm(x + residual, weight), x + residual


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.layer_norm(x, (HIDDEN,), weight, bias, 1e-6)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return layer_norm(x + residual, weight, bias)


def gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def unit(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return activation(gate) * up

    return unit


PROJECTED = (2, TOKENS, HIDDEN), (INNER, HIDDEN), (INNER,)
ADAPTED = (2, TOKENS, HIDDEN), (4, HIDDEN), (INNER, 4)
FROZEN = torch.linspace(-1, 1, INNER * HIDDEN).view(INNER, HIDDEN).mul(64).round().div(64)  # exact in 16 bits


def adapted(f: Callable, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return f(x, FROZEN.to(x), None, [adapter(f, a, b)])


def adapted_together(f: Callable, x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    return f(x, [(FROZEN.to(x), None, adapter(f, a, b))] * 2)


def adapter(f: Callable, a: Tensor, b: Tensor) -> tuple:
    return f.__globals__["Adapter"](a, b, 2.0)


def adapted_exactly(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    y = F.linear(x, FROZEN.to(x)) + 2 * F.linear(F.linear(x, a), b)
    return y, y.clone()


def clipped_swiglu(x: Tensor) -> Tensor:
    return GptOssExperts._apply_gate(SimpleNamespace(alpha=1.702, limit=7.0), x)


def clamped_swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate.clamp(max=0.75)) * up.clamp(-0.75, 0.75)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def both_rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(rotated(x, cos.unsqueeze(1), sin.unsqueeze(1)) for x in (q, k))


SECTION = [2, 3, 3]


def multimodal(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = (torch.cat([part[i % 3] for i, part in enumerate(t.split(SECTION * 2, -1))], -1) for t in (cos, sin))
    return both_rotated(q, k, cos, sin)


def product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.cat([rows @ w + b for rows, w, b in zip(x.split(COUNTS.tolist()), weight, bias)])


def product_of_list(x: Tensor, *weights: Tensor) -> Tensor:
    return torch.cat([rows @ w.mT for rows, w in zip(x.split(COUNTS.tolist()), weights)])


def experts(x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    rows = []
    for token, chosen, shares in zip(x, index.tolist(), weights):
        parts = [gated(F.silu)(gate_up[e] @ token) for e in chosen]
        rows.append(sum(share * (down[e] @ part) for e, share, part in zip(chosen, shares, parts)))
    return torch.stack(rows)


def experts_forward(forward: Callable, x: Tensor, index: Tensor, weights: Tensor, *parameters: Tensor) -> Tensor:
    module = experts_classes.instance(Qwen3MoeExperts)
    for name, parameter in zip(("gate_up_proj", "down_proj"), parameters):
        delattr(module, name)
        setattr(module, name, parameter)
    return forward(module, x, index, weights)


def top_k(logits: Tensor) -> Tensor:
    weights, _ = logits.softmax(-1).topk(CHOICES)
    return weights / weights.sum(-1, keepdim=True)


GROUPS = 2
# With logits and a bias that no rounding puts into another order.
LOGITS = torch.stack([torch.randperm(8, generator=torch.Generator().manual_seed(i)) for i in range(TOKENS)]) / 2 - 2
CORRECTION = torch.tensor([-9, -3, 8, 11, -3, 5, 8, -11]) / 32


def grouped_top_k(logits: Tensor, correction: Tensor) -> tuple[Tensor, Tensor]:
    """The gating of DeepSeek-V3, token by token."""
    weights, chosen = [], []
    for scores in 1 / (1 + (-logits).exp()):
        merits = dict(enumerate((scores + correction).tolist()))
        size = len(merits) // GROUPS
        groups = [list(merits)[start : start + size] for start in range(0, len(merits), size)]
        best = max(groups, key=lambda group: sum(sorted(merits[e] for e in group)[-2:]))
        chosen.append(sorted(best, key=merits.get, reverse=True)[:CHOICES])
        weights.append(2.5 * scores[chosen[-1]] / scores[chosen[-1]].sum())
    return torch.stack(weights), torch.tensor(chosen)


def draw(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    return attention_truth.attention(q, k, v, 0.25, True, (3, 0), sinks=sinks)


def packed_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention_truth.packed(q, k, v, [5, 7], [5, 7], 0.25, causal=True)


class SelfAttention(nn.Module):
    is_causal = True


def attention_of_module(forward: Callable, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return forward(SelfAttention(), *(t.transpose(1, 2) for t in (q, k, v)), None)[0]


def masked_attention(kernel_mask: Callable, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What the description says, as a mask, is what the attention of torch leaves out."""
    mask = kernel_mask(q.shape[0], q.shape[1], k.shape[1], device=q.device)[:]
    q, k, v = (t.transpose(1, 2) for t in (q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)))
    scores = (q @ k.mT * 0.25).masked_fill(~mask, -torch.inf)
    return (scores.float().softmax(-1).to(v.dtype) @ v).transpose(1, 2)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention_truth.attention(q, k, v, 0.25, True)


def row_losses(logits: Tensor) -> Tensor:
    return -logits.log_softmax(-1).gather(-1, LABELS.unsqueeze(-1)).squeeze(-1)


def head_losses(hidden_states: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return row_losses(hidden_states @ weight.mT + bias)


WORDS = 40
LABELS = torch.randint(WORDS, (TOKENS,), generator=torch.Generator().manual_seed(0))
HEAD = (TOKENS, HIDDEN), (WORDS, HIDDEN), (WORDS,)


def delta_rule(function: Callable, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options) -> Tensor:
    """With decays and betas as models have them, of any numbers."""
    return function(q, k, v, -g.abs(), beta.sigmoid(), **options)[0]


def normed_delta_rule(function: Callable, *tensors: Tensor) -> Tensor:
    return delta_rule(function, *tensors, use_qk_l2norm_in_kernel=True)


def exact_delta_rule(*tensors: Tensor) -> Tensor:
    return delta_rule(delta_rule_truth.delta_rule, *tensors)


def convolution(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = F.pad(x, (weight.shape[1] - 1, 0)).unfold(-1, weight.shape[1], 1) * weight.unsqueeze(1)
    return F.silu(y.sum(-1) + bias.unsqueeze(-1))


def convolution_behind(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return convolution(torch.cat([state, x], -1), weight, bias)[..., -x.shape[-1] :]


def selective_scan(function: Callable, *tensors: Tensor) -> Tensor:
    """With decays as models have them, of any numbers."""
    u, delta, decays, b, c, skipped, z, bias = tensors
    return function(u, delta, -decays.abs(), b, c, skipped, z, bias, delta_softplus=True)


def exact_selective_scan(u, delta, decays, b, c, skipped, z, bias, delta_softplus: bool) -> Tensor:
    delta, state, results = F.softplus(delta + bias.unsqueeze(-1)), 0.0, []
    for t in range(u.shape[-1]):
        state = (delta[..., t, None] * decays).exp() * state + (delta * u)[..., t, None] * b[:, None, :, t]
        results.append((state * c[:, None, :, t]).sum(-1))
    return (torch.stack(results, -1) + skipped.unsqueeze(-1) * u) * F.silu(z)


def linear_recurrence(decays: Tensor, added: Tensor, state: Tensor) -> Tensor:
    results = []
    for a, b in zip(decays.unbind(1), added.unbind(1)):
        state = a * state + b
        results.append(state)
    return torch.stack(results, 1)


RULED = (1, 70, 2, 8), (1, 70, 2, 8), (1, 70, 2, 8), (1, 70, 2), (1, 70, 2)
RULED_BY_CHANNEL = *RULED[:3], (1, 70, 2, 8), RULED[4]
STEP, STEP_BY_CHANNEL = ([(3, 1, *shape[2:]) for shape in shapes] for shapes in (RULED, RULED_BY_CHANNEL))
HEADS = (2, 4, 6, 16), (2, 2, 6, 16)
ATTENDED = (2, 9, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16)
INDEX = torch.stack(
    [torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(i))[:CHOICES] for i in range(TOKENS)]
)
ROUTED = draw((TOKENS, HIDDEN), (TOKENS, CHOICES), (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER))
ROUTED = (ROUTED[0], INDEX, ROUTED[1], ROUTED[2] / HIDDEN**0.5, ROUTED[3] / INNER**0.5)
OF_LIST = draw((TOKENS, HIDDEN), *[(INNER, HIDDEN)] * EXPERTS)

# repository and name -> how a kernel's function is called, what it has to give in float64, arguments
CASES: dict[tuple[str, str], tuple[Callable, Callable, tuple]] = {
    ("RMSNorm", "rms_norm"): (lambda f, x, w: f(x, w, 1e-6), rms_norm, draw((6, HIDDEN), (HIDDEN,))),
    ("RMSNorm", "add_rms_norm"): (
        lambda f, x, r, w: f(x, r, w, 1e-6), add_rms_norm, draw((6, HIDDEN), (6, HIDDEN), (HIDDEN,)),
    ),
    ("RMSNorm", "layer_norm"): (lambda f, x, w: f(x, w, None, 1e-6), layer_norm, draw((6, HIDDEN), (HIDDEN,))),
    ("RMSNorm", "add_layer_norm"): (
        lambda f, *t: f(*t, 1e-6), add_layer_norm, draw((6, HIDDEN), (6, HIDDEN), (HIDDEN,), (HIDDEN,)),
    ),
    ("SwiGLU", "swiglu"): (lambda f, x: f(x), gated(F.silu), draw((6, 2 * HIDDEN))),
    ("SwiGLU", "geglu"): (lambda f, x: f(x), gated(lambda x: F.gelu(x, approximate="tanh")), draw((6, 2 * HIDDEN))),
    ("SwiGLU", "clamped_swiglu"): (lambda f, x: f(x, limit=0.75), clamped_swiglu, draw((6, 2 * HIDDEN))),
    ("SwiGLU", "clipped_swiglu"): (lambda f, x: f(x), clipped_swiglu, draw((6, 2 * HIDDEN))),
    ("Activation", "gelu_tanh"): (lambda f, x: f(x), lambda x: F.gelu(x, approximate="tanh"), draw((6, HIDDEN))),
    ("Activation", "quick_gelu"): (lambda f, x: f(x), lambda x: x / (1 + (-1.702 * x).exp()), draw((6, HIDDEN))),
    ("RoPE", "rotary_mul"): (lambda f, *t: f(*t), rotated, draw(HEADS[0], (2, 1, 6, 16), (2, 1, 6, 16))),
    ("RoPE", "apply_rotary_pos_emb"): (lambda f, *t: f(*t), both_rotated, draw(*HEADS, (2, 6, 16), (2, 6, 16))),
    ("RoPE", "apply_multimodal_rotary_pos_emb"): (
        lambda f, *t: f(*t, SECTION), multimodal, draw(*HEADS, (3, 2, 6, 16), (3, 2, 6, 16)),
    ),
    ("FlashAttention", "flash_attn_func"): (
        lambda f, q, k, v, s: f(q, k, v, causal=True, window_size=(3, 0), s_aux=s), attention, draw(*ATTENDED, (4,)),
    ),
    ("FlashAttention", "flash_attn_varlen_func"): (
        lambda f, *t: f(*t, [0, 5, 12], [0, 5, 12], causal=True), packed_attention,
        draw((12, 4, 16), (12, 2, 16), (12, 2, 16)),
    ),
    ("FlashAttention", "attention_forward"): (attention_of_module, causal_attention, draw(*ATTENDED)),
    ("FlashAttention", "attention_mask"): (masked_attention, causal_attention, draw(*ATTENDED)),
    ("CrossEntropy", "cross_entropy"): (
        lambda f, x: f(x, LABELS.to(x.device), reduction="none"), row_losses, draw((TOKENS, WORDS)),
    ),
    ("CrossEntropy", "linear_cross_entropy"): (
        lambda f, h, w, b: f(h, w, LABELS.to(h.device), b, reduction="none"), head_losses, draw(*HEAD),
    ),
    ("CrossEntropy", "linear_log_probs"): (
        lambda f, h, w, b: f(h, w, LABELS.to(h.device), b), lambda *t: -head_losses(*t), draw(*HEAD),
    ),
    ("Linear", "linear"): (lambda f, *t: f(*t), F.linear, draw(*PROJECTED)),
    ("Linear", "linears"): (
        lambda f, x, w, b: f(x, [w, w], [b, None]),
        lambda x, w, b: (F.linear(x, w, b), F.linear(x, w)),
        draw(*PROJECTED),
    ),
    ("Linear", "lora_linear"): (adapted, lambda *t: adapted_exactly(*t)[0], draw(*ADAPTED)),
    ("Linear", "lora_linears"): (adapted_together, adapted_exactly, draw(*ADAPTED)),
    ("LinearAttention", "chunk_gated_delta_rule"): (normed_delta_rule, exact_delta_rule, draw(*RULED)),
    ("LinearAttention", "chunk_kda"): (normed_delta_rule, exact_delta_rule, draw(*RULED_BY_CHANNEL)),
    ("LinearAttention", "fused_recurrent_gated_delta_rule"): (normed_delta_rule, exact_delta_rule, draw(*STEP)),
    ("LinearAttention", "fused_recurrent_kda"): (normed_delta_rule, exact_delta_rule, draw(*STEP_BY_CHANNEL)),
    ("LinearAttention", "causal_conv1d_fn"): (
        lambda f, *t: f(*t, "silu"), convolution, draw((2, 8, 9), (8, 4), (8,)),
    ),
    ("LinearAttention", "causal_conv1d_update"): (
        lambda f, x, s, w, b: f(x, s.clone(), w, b, "silu"),
        convolution_behind,
        draw((2, 8, 1), (2, 8, 4), (8, 4), (8,)),
    ),
    ("LinearAttention", "selective_scan_fn"): (
        selective_scan,
        lambda *t: selective_scan(exact_selective_scan, *t),
        draw((2, 8, 40), (2, 8, 40), (8, 4), (2, 4, 40), (2, 4, 40), (8,), (2, 8, 40), (8,)),
    ),
    ("LinearAttention", "linear_recurrence"): (
        lambda f, a, b, s: f(a.sigmoid(), b, s)[0],
        lambda a, b, s: linear_recurrence(a.sigmoid(), b, s),
        draw((2, 40, 8), (2, 40, 8), (2, 8)),
    ),
    ("FusedMoE", "grouped_matmul"): (
        lambda f, x, w, b: f(x, w, COUNTS.to(x.device), b),
        product,
        draw((TOKENS, HIDDEN), (EXPERTS, HIDDEN, INNER), (EXPERTS, INNER)),
    ),
    ("FusedMoE", "GmmFunction"): (
        lambda f, x, w, b: f.apply(x, w, COUNTS.to(x.device), b, None),
        product,
        draw((TOKENS, HIDDEN), (EXPERTS, HIDDEN, INNER), (EXPERTS, INNER)),
    ),
    ("FusedMoE", "HybridGmmFunction"): (
        lambda f, x, *w: f.apply(x, COUNTS.to(x.device), None, False, *w), product_of_list, OF_LIST,
    ),
    ("FusedMoE", "fused_experts"): (lambda f, *t: f(*t), experts, ROUTED),
    ("FusedMoE", "experts_forward"): (experts_forward, experts, ROUTED),
    ("FusedMoE", "gating_top_k"): (
        # A row for each choice: the gradient of what is divided by its sum is one of differences between the choices of
        # a token, which neighbours on the ramp of the gradients would lose to rounding.
        lambda f, *t: tuple(x.mT for x in f(t[0], CHOICES, t[1], groups=GROUPS, scale=2.5)),
        lambda *t: tuple(x.mT for x in grouped_top_k(*t)),
        (LOGITS, CORRECTION),
    ),
    ("FusedMoE", "softmax_top_k"): (lambda f, x: f(x, CHOICES)[0], top_k, draw((TOKENS, EXPERTS))),
}  # fmt: skip
# they compute nothing, or are parts of what is called here
OTHERS = {"SWIGLU", "Adapter", "Shard", "Gate", "alignment", "blocks", "gates", "layers", "layout", "packing"}


def test_the_list_is_complete(kernels: dict[str, ModuleType]) -> None:
    assert set(CASES) == {(name, f) for name, kernel in kernels.items() for f in kernel.__all__ if f not in OTHERS}


@pytest.mark.parametrize("dtype", proofs.DTYPES, ids=str)
@pytest.mark.parametrize(("repository", "name"), CASES, ids=lambda value: value)
def test_it_is_what_float64_gives(kernels, largest, repository: str, name: str, dtype: torch.dtype) -> None:
    call, exact, arguments = CASES[repository, name]
    rounded = tuple(t.to(dtype) if t.is_floating_point() else t for t in arguments)
    function = getattr(kernels[repository], name)
    found = proofs.results(lambda *t: call(function, *t), proofs.moved(rounded))
    difference = proofs.distance(found, proofs.results(exact, proofs.doubled(rounded)))
    largest("functions", dtype, difference)
    assert difference <= proofs.TOLERANCE[dtype]
