"""Delta rules, scans and causal convolutions, with lengths at and around the chunks that they are computed in."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels_ext_npu.selftest.cases import Shapes, at_limits

LENGTHS = {"": 70, "one token": 1, "63 tokens": 63, "64 tokens": 64, "65 tokens": 65, "129 tokens": 129}
HEADS, SIZE = 2, 8


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None, normalised: bool = True
) -> tuple[Tensor, Tensor]:
    """Compute the gated delta rule, a step a token, in the dtype that it is given: float64 where it is a truth.

    ``S⁺ = e^g S + k ⊗ β (v - kᵀ e^g S)`` and ``o = qᵀS⁺``: "Gated Delta Networks" (arXiv 2412.06464), equation 10; with
    a gate for every channel "Kimi Linear" (arXiv 2510.26692), equation 1.

    Returns:
        the results ``[B, T, H, V]`` and the last state ``[B, H, K, V]``; q and k may have fewer heads than v.
    """
    groups = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(groups, 2) for x in (q, k))
    if normalised:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    g = g.unsqueeze(-1) if g.dim() == 3 else g
    if state is None:
        state = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])
    results = []
    for t in range(v.shape[1]):
        state = state * g[:, t].exp().unsqueeze(-1)
        change = (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)) * beta[:, t].unsqueeze(-1)
        state = state + k[:, t].unsqueeze(-1) * change.unsqueeze(-2)
        results.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(results, 1), state


def _shapes(batch: int, length: int, by_channel: bool) -> Shapes:
    heads = (batch, length, HEADS)
    return [*[(*heads, SIZE)] * 3, (*heads, SIZE) if by_channel else heads, heads]


def _ruled(function: Callable, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options) -> Any:
    """With decays and betas as models have them, of any numbers."""
    return function(q, k, v, -g.abs(), beta.sigmoid(), **options)


def _convolved(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = F.pad(x, (weight.shape[1] - 1, 0)).unfold(-1, weight.shape[1], 1) * weight.unsqueeze(1)
    return F.silu(y.sum(-1) + bias.unsqueeze(-1))


def _convolved_behind(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return _convolved(torch.cat([state, x], -1), weight, bias)[..., -x.shape[-1] :]


def _scanned(function: Callable, *tensors: Tensor) -> Any:
    """With decays as models have them, of any numbers."""
    u, delta, decays, b, c, skipped, z, bias = tensors
    return function(u, delta, -decays.abs(), b, c, skipped, z, bias, delta_softplus=True, return_last_state=True)


def _scanned_exactly(u, delta, decays, b, c, skipped, z, bias, **_: bool) -> tuple[Tensor, Tensor]:
    delta = F.softplus(delta + bias.unsqueeze(-1))
    state, results = torch.zeros_like(u[..., :1]), []
    for t in range(u.shape[-1]):
        state = (delta[..., t, None] * decays).exp() * state + (delta * u)[..., t, None] * b[:, None, :, t]
        results.append((state * c[:, None, :, t]).sum(-1))
    return (torch.stack(results, -1) + skipped.unsqueeze(-1) * u) * F.silu(z), state


def _recurred(decays: Tensor, added: Tensor, state: Tensor) -> Tensor:
    results = []
    for a, b in zip(decays.sigmoid().unbind(1), added.unbind(1)):
        state = a * state + b
        results.append(state)
    return torch.stack(results, 1)


_at_limits = partial(at_limits, "LinearAttention")
_normed = partial(_ruled, initial_state=None, output_final_state=True, use_qk_l2norm_in_kernel=True)
_exact = partial(_ruled, delta_rule)
FUNCTIONS = (
    *_at_limits("chunk_gated_delta_rule", _normed, _exact, {at: _shapes(1, n, False) for at, n in LENGTHS.items()}),
    *_at_limits("chunk_kda", _normed, _exact, {at: _shapes(1, n, True) for at, n in LENGTHS.items()}),
    *_at_limits("fused_recurrent_gated_delta_rule", _normed, _exact, {"": _shapes(3, 1, False)}),
    *_at_limits("fused_recurrent_kda", _normed, _exact, {"": _shapes(3, 1, True)}),
    *_at_limits(
        "causal_conv1d_fn",
        lambda f, *t: f(*t, "silu"),
        _convolved,
        {at: ((2, 8, n), (8, 4), (8,)) for at, n in {"": 9, "one token": 1, "2,049 tokens": 2049}.items()},
    ),
    *_at_limits(
        "causal_conv1d_update",
        lambda f, x, s, w, b: f(x, s.clone(), w, b, "silu"),
        _convolved_behind,
        {"": ((2, 8, 1), (2, 8, 4), (8, 4), (8,))},
    ),
    *_at_limits(
        "selective_scan_fn",
        _scanned,
        partial(_scanned, _scanned_exactly),
        {at: ((2, 8, n), (2, 8, n), (8, 4), (2, 4, n), (2, 4, n), (8,), (2, 8, n), (8,)) for at, n in LENGTHS.items()},
    ),
    *_at_limits(
        "linear_recurrence",
        lambda f, a, b, s: f(a.sigmoid(), b, s)[0],
        _recurred,
        {at: ((2, n, 8), (2, n, 8), (2, 8)) for at, n in LENGTHS.items()},
    ),
)
