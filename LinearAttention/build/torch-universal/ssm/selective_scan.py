"""The selective scan of Mamba, ``h⁺ = exp(Δ A) h + Δ B x`` and ``y = C h``, for every channel by itself.

"Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (arXiv 2312.00752), equation 2, with the names of its
package mamba-ssm.
"""
# ruff: noqa: N803 - capital letters, as there

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._common.arguments import check_tensors, empty_result, narrowed
from .._common.autocast import without_autocast
from .._common.derivatives import is_transformed
from .._common.second_order import differentiable_once
from .elementwise_recurrence import (
    CHUNK,
    from_steps,
    gradients_around_chunks,
    scan_gradients,
    scan_states,
    states_around_chunks,
    to_steps,
)

BUDGET = 5 * 2**30  # bytes that the states of a segment may take while they are computed
_THRESHOLD = 20.0  # from here on softplus(x) is x, in torch
_LIVE_TENSORS = 4  # of the size of all states that the backward of a segment holds at once: counted on fake tensors


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the selective scan: ``h⁺ = exp(Δ A) h + Δ B u``, ``y = (C h⁺ + D u) · silu(z)``, all in float32.

    It is mamba_selective_scan of transformers, models/mamba/modeling_mamba.py, with all chunks of tokens at once.
    Differentiable once, as one node that keeps its arguments and one state a chunk. Under torch.func it is
    differentiable as often as torch's own operators are.

    Args:
        u: ``[B, D, T]``, of a floating dtype.
        delta: Δ, the sizes of the steps, ``[B, D, T]``.
        A: ``[D, N]``, below 0.
        B: ``[B, N, T]``.
        C: ``[B, N, T]``.
        D: ``[D]``, or None.
        z: its SiLU multiplies the results, ``[B, D, T]``, or None.
        delta_bias: what is added to delta, ``[D]``, or None.
        delta_softplus: whether softplus is taken of the sum.
        return_last_state: whether the state behind the last token is returned too.

    Returns:
        ``[B, D, T]`` in the dtype of u, and the state, ``[B, D, N]`` in float32, if it is asked for.

    Raises:
        ValueError: shapes or devices do not fit.
        TypeError: an argument is not floating point.
    """
    _check(u, delta, A, B, C, D, z, delta_bias)
    arguments = [narrowed(x) for x in (u, delta, z, B, C, A, D, delta_bias)]
    tokens_first = (None if x is None else x.transpose(1, 2) for x in arguments[:5])
    if u.numel():
        with without_autocast(u):
            given = Arguments(*tokens_first, *arguments[5:])
            if is_transformed():  # a node of autograd would be opaque to torch.func, and torch's operators are not
                out, chunk_states = _forward(given, delta_softplus)
                state = chunk_states[-1][-1]
            else:
                out, state = _SelectiveScan.apply(*given, delta_softplus)
        out = out.transpose(1, 2)
    else:
        out = empty_result(*arguments, shape=u.shape, dtype=arguments[0].dtype)
        state = out.new_zeros((u.shape[0], *A.shape), dtype=torch.float32) + out.float().sum()
    return (out, state) if return_last_state else out


class Arguments(NamedTuple):
    """Holds the arguments, with tokens before channels: u, delta and z ``[B, T, D]``, B and C ``[B, T, N]``."""

    u: Tensor
    delta: Tensor
    z: Tensor | None
    B: Tensor
    C: Tensor
    A: Tensor
    D: Tensor | None
    bias: Tensor | None


class _Steps:
    """Holds the tokens of a segment in the steps of elementwise_recurrence.py, with their decays."""

    def __init__(self, arguments: Arguments, softplus: bool) -> None:
        self.A, self.length = arguments.A.float(), arguments.u.shape[1]
        delta = arguments.delta.float()
        self.raw_delta = delta if arguments.bias is None else delta + arguments.bias.float()
        delta = nn.functional.softplus(self.raw_delta, threshold=_THRESHOLD) if softplus else self.raw_delta
        self.delta, self.u, self.B, self.C = (to_steps(x) for x in (delta, arguments.u, arguments.B, arguments.C))
        self.decays = (self.delta.unsqueeze(-1) * self.A).exp_()
        self.chunk_decay = (self.delta.sum(0).unsqueeze(-1) * self.A).exp_()

    def updates(self) -> Tensor:
        """Compute ``Δ B u``, ``[C, n, B, D, N]``."""
        return (self.delta * self.u).unsqueeze(-1) * self.B.unsqueeze(-2)

    def outputs(self, states: Tensor) -> Tensor:
        """Compute ``C h``, ``[B, T, D]``, of the states before the first token of a chunk and behind each token."""
        return from_steps(_batched_matmul(states[1:], self.C.unsqueeze(-1)).squeeze(-1), self.length)


class _SelectiveScan(torch.autograd.Function):
    """Saves the arguments as they were given, and the states between chunks."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        *tensors, softplus = inputs
        out, chunk_states = _forward(Arguments(*tensors), softplus)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(*tensors, *chunk_states)
            ctx.softplus = softplus
        ctx.set_materialize_grads(False)
        return out, chunk_states[-1][-1].clone()

    @staticmethod
    @differentiable_once
    def backward(
        ctx: Any, saved: tuple[Tensor, ...], grad: Tensor | None, grad_state: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        count = len(Arguments._fields)
        arguments, chunk_states = Arguments(*saved[:count]), saved[count:]
        wanted = Arguments(*ctx.needs_input_grad[:count])
        grad = torch.zeros_like(arguments.u) if grad is None else grad
        grad_state = torch.zeros_like(chunk_states[-1][-1]) if grad_state is None else grad_state
        found: list[Arguments] = []
        for part, states in reversed(list(zip(_segments(arguments), chunk_states))):
            grads, grad_state = _backward(
                _segment(arguments, part), ctx.softplus, states[:-1], grad[:, part].contiguous(), grad_state, wanted
            )
            found.insert(0, grads)
        results = (_join_segments(name, [getattr(one, name) for one in found]) for name in Arguments._fields)
        return *(x if x is None else x.to(y.dtype) for x, y in zip(results, arguments)), None


def _forward(arguments: Arguments, softplus: bool) -> tuple[Tensor, list[Tensor]]:
    """Compute the results, and of each segment the states around its chunks, ``[n + 1, B, D, N]``."""
    results: list[Tensor] = []
    chunk_states: list[Tensor] = []
    state = arguments.u.new_zeros((arguments.u.shape[0], *arguments.A.shape), dtype=torch.float32)
    for part in _segments(arguments):
        segment = _segment(arguments, part)
        steps = _Steps(segment, softplus)
        updates = steps.updates()
        chunk_states.append(states_around_chunks(steps.decays, updates, steps.chunk_decay, state))
        state = chunk_states[-1][-1]
        y = _add_skip(steps.outputs(scan_states(steps.decays, updates, chunk_states[-1][:-1])), segment)
        y = y if segment.z is None else y * nn.functional.silu(segment.z.float())
        results.append(y.to(arguments.u.dtype))
    return results[0] if len(results) == 1 else torch.cat(results, 1), chunk_states


def _backward(
    segment: Arguments, softplus: bool, chunk_states: Tensor, grad: Tensor, grad_state: Tensor, wanted: Arguments
) -> tuple[Arguments, Tensor]:
    """Compute the gradients of the arguments in a segment, and of the state before it.

    Args:
        segment: its arguments.
        softplus: whether it is taken of delta.
        chunk_states: the states before its chunks, ``[n, B, D, N]``.
        grad: of the results, ``[B, T, D]``.
        grad_state: of the state behind the segment, ``[B, D, N]``.
        wanted: which arguments need a gradient, a bool for each.
    """
    steps = _Steps(segment, softplus)
    states = scan_states(steps.decays, steps.updates(), chunk_states)
    grad, d_z = grad.float(), None
    if segment.z is not None:
        z = segment.z.float()
        d_z = torch.ops.aten.silu_backward(grad * _add_skip(steps.outputs(states), segment), z)
        grad = grad * nn.functional.silu(z)
    u = segment.u.float()
    d_y = to_steps(grad)
    d_outputs = d_y.unsqueeze(-1) * steps.C.unsqueeze(-2)
    d_chunk_states = gradients_around_chunks(steps.decays, d_outputs, steps.chunk_decay, grad_state)
    d_states = scan_gradients(steps.decays, d_outputs, d_chunk_states[1:])
    del d_outputs
    d_delta_u = _batched_matmul(d_states, steps.B.unsqueeze(-1)).squeeze(-1)
    d_b = _batched_matmul((steps.delta * steps.u).unsqueeze(-2), d_states).squeeze(-2)
    d_c = _batched_matmul(d_y.unsqueeze(-2), states[1:]).squeeze(-2)
    d_exponents = steps.decays.mul_(states[:-1]).mul_(d_states)  # of Δ A
    d_a = (d_exponents * steps.delta.unsqueeze(-1)).sum((0, 1, 2)) if wanted.A else None
    d_delta = torch.addcmul((d_exponents * steps.A).sum(-1), d_delta_u, steps.u)
    d_delta = from_steps(d_delta, steps.length)
    d_delta = torch.ops.aten.softplus_backward(d_delta, steps.raw_delta, 1.0, _THRESHOLD) if softplus else d_delta
    d_u = from_steps(d_delta_u * steps.delta, steps.length)
    return Arguments(
        u=d_u if segment.D is None else torch.addcmul(d_u, grad, segment.D.float()),
        delta=d_delta,
        z=d_z,
        B=from_steps(d_b, steps.length),
        C=from_steps(d_c, steps.length),
        A=d_a,
        D=None if segment.D is None else (grad * u).sum((0, 1)),
        bias=None if segment.bias is None else d_delta.sum((0, 1)),
    ), d_chunk_states[0]


def _segments(arguments: Arguments) -> Iterator[slice]:
    """Split the tokens into segments of whole chunks whose states stay below the budget."""
    batch, length = arguments.u.shape[:2]
    step = CHUNK * max(1, BUDGET // max(1, 4 * _LIVE_TENSORS * CHUNK * batch * arguments.A.numel()))
    start = 0
    while start < length:  # a range would tie a graph to one length
        yield slice(start, start + step)
        start += step


def _segment(arguments: Arguments, part: slice) -> Arguments:
    """Return the arguments of a segment, contiguous: each operator would copy again what is strided."""
    u, delta, z, b, c = (None if x is None else x[:, part].contiguous() for x in arguments[:5])
    return Arguments(u, delta, z, b, c, *arguments[5:])  # type: ignore[arg-type]


def _join_segments(name: str, parts: list[Tensor | None]) -> Tensor | None:
    """Join the gradients of one argument from all segments: one behind the other, or their sum if it has no tokens."""
    if parts[0] is None or len(parts) == 1:
        return parts[0]
    return torch.cat(parts, 1) if name in ("u", "delta", "z", "B", "C") else sum(parts)  # type: ignore[arg-type]


def _add_skip(y: Tensor, arguments: Arguments) -> Tensor:
    """Add ``D u``."""
    return y if arguments.D is None else torch.addcmul(y, arguments.u.float(), arguments.D.float())


def _batched_matmul(left: Tensor, right: Tensor) -> Tensor:
    """Multiply the matrices in the last two dimensions."""
    return torch.bmm(left.flatten(0, 2), right.flatten(0, 2)).unflatten(0, left.shape[:3])


def _check(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, *others: Tensor | None) -> None:
    """Raise what :func:`selective_scan_fn` documents, for arguments that do not fit."""
    named = dict(zip(("u", "delta", "A", "B", "C", "D", "z", "delta_bias"), (u, delta, A, B, C, *others)))
    check_tensors(**named)
    known = {name: x for name, x in named.items() if x is not None}
    fits = u.dim() == 3 and A.dim() == 2 and A.shape[0] == u.shape[1]
    if fits:
        batch, channels, length = u.shape
        tokens, projections, each = (batch, channels, length), (batch, A.shape[1], length), (channels,)
        shapes = {"delta": tokens, "z": tokens, "B": projections, "C": projections, "D": each, "delta_bias": each}
        fits = all(known[name].shape == shape for name, shape in shapes.items() if name in known)
    if not fits:
        found = ", ".join(f"{name} {list(x.shape)}" for name, x in known.items())
        raise ValueError(
            f"u, delta and z [B, D, T], A [D, N], B and C [B, N, T], D and delta_bias [D] have to fit: {found}"
        )
