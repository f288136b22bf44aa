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

from .._common.arguments import check_tensors, narrowed
from .._common.autocast import without_autocast
from .._common.functorch import is_transformed
from .._common.second_order import differentiable_once
from ..utils.empty_result import empty_of
from .elementwise_recurrence import CHUNK, before_chunks, behind_chunks, from_steps, in_steps, state_gradients, states

BUDGET = 5 * 2**30  # bytes that the states of a segment may take while they are computed
_THRESHOLD = 20.0  # from here on softplus(x) is x, in torch
_AT_ONCE = 4  # tensors of all states of a segment that its backward holds: counted on fake tensors


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
        delta: steps of time, ``[B, D, T]``.
        A: ``[D, N]``, below 0.
        B: ``[B, N, T]``.
        C: ``[B, N, T]``.
        D: ``[D]``, or None.
        z: a gate, ``[B, D, T]``, or None.
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
    given = [narrowed(x) for x in (u, delta, z, B, C, A, D, delta_bias)]
    turned = (None if x is None else x.transpose(1, 2) for x in given[:5])
    if u.numel():
        with without_autocast(u):
            out, state = _scan(Given(*turned, *given[5:]), delta_softplus)
        out = out.transpose(1, 2)
    else:
        out = empty_of(*given, shape=u.shape, dtype=given[0].dtype)
        state = out.new_zeros((u.shape[0], *A.shape), dtype=torch.float32) + out.float().sum()
    return (out, state) if return_last_state else out


class Given(NamedTuple):
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
    """Holds the tokens of a segment in the steps of elementwise_recurrence.py, with what they decay and add."""

    def __init__(self, given: Given, softplus: bool) -> None:
        self.A, self.length = given.A.float(), given.u.shape[1]
        delta = given.delta.float()
        self.raw = delta if given.bias is None else delta + given.bias.float()
        delta = nn.functional.softplus(self.raw, threshold=_THRESHOLD) if softplus else self.raw
        self.delta, self.u, self.B, self.C = (in_steps(x) for x in (delta, given.u, given.B, given.C))
        self.decays = (self.delta.unsqueeze(-1) * self.A).exp_()
        self.whole = (self.delta.sum(0).unsqueeze(-1) * self.A).exp_()

    def added(self) -> Tensor:
        """Compute ``Δ B u``, ``[C, n, B, D, N]``."""
        return (self.delta * self.u).unsqueeze(-1) * self.B.unsqueeze(-2)

    def read(self, walked: Tensor) -> Tensor:
        """Compute ``C h`` of states, ``[B, T, D]``."""
        return from_steps(_product(walked[1:], self.C.unsqueeze(-1)).squeeze(-1), self.length)


def _scan(given: Given, softplus: bool) -> tuple[Tensor, Tensor]:
    if is_transformed():  # torch.func has rules for all that is in it
        out, around = _forward(given, softplus)
        return out, around[-1][-1]
    return _SelectiveScan.apply(*given, softplus)


class _SelectiveScan(torch.autograd.Function):
    """Keeps the arguments as they were given, and the states between chunks."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *tensors, softplus = arguments
        out, around = _forward(Given(*tensors), softplus)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(*tensors, *around)
            ctx.softplus = softplus
        ctx.set_materialize_grads(False)
        return out, around[-1][-1].clone()

    @staticmethod
    @differentiable_once
    def backward(
        ctx: Any, saved: tuple[Tensor, ...], grad: Tensor | None, grad_state: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        count = len(Given._fields)
        given, around = Given(*saved[:count]), saved[count:]
        wanted = Given(*ctx.needs_input_grad[:count])
        grad = torch.zeros_like(given.u) if grad is None else grad
        grad_state = torch.zeros_like(around[-1][-1]) if grad_state is None else grad_state
        found: list[Given] = []
        for part, before in reversed(list(zip(_segments(given), around))):
            grads, grad_state = _backward(
                _of(given, part), ctx.softplus, before[:-1], grad[:, part].contiguous(), grad_state, wanted
            )
            found.insert(0, grads)
        results = (_joined(name, [getattr(one, name) for one in found]) for name in Given._fields)
        return *(x if x is None else x.to(y.dtype) for x, y in zip(results, given)), None


def _forward(given: Given, softplus: bool) -> tuple[Tensor, list[Tensor]]:
    """Compute the results, and of each segment the states around its chunks, ``[n + 1, B, D, N]``."""
    results: list[Tensor] = []
    around: list[Tensor] = []
    state = given.u.new_zeros((given.u.shape[0], *given.A.shape), dtype=torch.float32)
    for part in _segments(given):
        own = _of(given, part)
        steps = _Steps(own, softplus)
        added = steps.added()
        around.append(before_chunks(steps.decays, added, steps.whole, state))
        state = around[-1][-1]
        y = _skipped(steps.read(states(steps.decays, added, around[-1][:-1])), own)
        y = y if own.z is None else y * nn.functional.silu(own.z.float())
        results.append(y.to(given.u.dtype))
    return results[0] if len(results) == 1 else torch.cat(results, 1), around


def _backward(
    given: Given, softplus: bool, before: Tensor, grad: Tensor, grad_state: Tensor, wanted: Given
) -> tuple[Given, Tensor]:
    """Compute the gradients of the arguments in a segment, and of the state before it.

    Args:
        given: the tokens of the segment.
        softplus: whether it is taken of the steps of time.
        before: the states before its chunks, ``[n, B, D, N]``.
        grad: of the results, ``[B, T, D]``.
        grad_state: of the state behind the segment, ``[B, D, N]``.
        wanted: of what gradients are wanted.
    """
    steps = _Steps(given, softplus)
    walked = states(steps.decays, steps.added(), before)
    grad, of_z = grad.float(), None
    if given.z is not None:
        z = given.z.float()
        of_z = torch.ops.aten.silu_backward(grad * _skipped(steps.read(walked), given), z)
        grad = grad * nn.functional.silu(z)
    u = given.u.float()
    in_grad = in_steps(grad)
    own = in_grad.unsqueeze(-1) * steps.C.unsqueeze(-2)
    around = behind_chunks(steps.decays, own, steps.whole, grad_state)
    of_states = state_gradients(steps.decays, own, around[1:])
    del own
    of_added = _product(of_states, steps.B.unsqueeze(-1)).squeeze(-1)  # Δ u
    of_b = _product((steps.delta * steps.u).unsqueeze(-2), of_states).squeeze(-2)
    of_c = _product(in_grad.unsqueeze(-2), walked[1:]).squeeze(-2)
    of_exponents = steps.decays.mul_(walked[:-1]).mul_(of_states)
    of_a = (of_exponents * steps.delta.unsqueeze(-1)).sum((0, 1, 2)) if wanted.A else None
    of_delta = torch.addcmul((of_exponents * steps.A).sum(-1), of_added, steps.u)
    of_delta = from_steps(of_delta, steps.length)
    of_delta = torch.ops.aten.softplus_backward(of_delta, steps.raw, 1.0, _THRESHOLD) if softplus else of_delta
    of_u = from_steps(of_added * steps.delta, steps.length)
    return Given(
        u=of_u if given.D is None else torch.addcmul(of_u, grad, given.D.float()),
        delta=of_delta,
        z=of_z,
        B=from_steps(of_b, steps.length),
        C=from_steps(of_c, steps.length),
        A=of_a,
        D=None if given.D is None else (grad * u).sum((0, 1)),
        bias=None if given.bias is None else of_delta.sum((0, 1)),
    ), around[0]


def _segments(given: Given) -> Iterator[slice]:
    """Give the tokens in segments of whole chunks whose states stay below the budget."""
    batch, length = given.u.shape[:2]
    step = CHUNK * max(1, BUDGET // max(1, 4 * _AT_ONCE * CHUNK * batch * given.A.numel()))
    start = 0
    while start < length:  # a range would tie a graph to one length
        yield slice(start, start + step)
        start += step


def _of(given: Given, part: slice) -> Given:
    """Return the arguments of a segment, turned once: operators would copy what is strided again and again."""
    u, delta, z, b, c = (None if x is None else x[:, part].contiguous() for x in given[:5])
    return Given(u, delta, z, b, c, *given[5:])  # type: ignore[arg-type]


def _joined(name: str, parts: list[Tensor | None]) -> Tensor | None:
    """Join what segments have of a gradient: of tokens one after the other, of others the sum."""
    if parts[0] is None or len(parts) == 1:
        return parts[0]
    return torch.cat(parts, 1) if name in ("u", "delta", "z", "B", "C") else sum(parts)  # type: ignore[arg-type]


def _skipped(y: Tensor, given: Given) -> Tensor:
    return y if given.D is None else torch.addcmul(y, given.u.float(), given.D.float())


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply the matrices in the last two dimensions."""
    return torch.bmm(left.flatten(0, 2), right.flatten(0, 2)).unflatten(0, left.shape[:3])


def _check(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, *others: Tensor | None) -> None:
    """Raise what the function says of arguments that do not fit."""
    named = dict(zip(("u", "delta", "A", "B", "C", "D", "z", "delta_bias"), (u, delta, A, B, C, *others)))
    check_tensors(**named)
    known = {name: x for name, x in named.items() if x is not None}
    fits = u.dim() == 3 and A.dim() == 2 and A.shape[0] == u.shape[1]
    if fits:
        batch, channels, length = u.shape
        tokens, of_states, each = (batch, channels, length), (batch, A.shape[1], length), (channels,)
        shapes = {"delta": tokens, "z": tokens, "B": of_states, "C": of_states, "D": each, "delta_bias": each}
        fits = all(known[name].shape == shape for name, shape in shapes.items() if name in known)
    if not fits:
        found = ", ".join(f"{name} {list(x.shape)}" for name, x in known.items())
        raise ValueError(
            f"u, delta and z [B, D, T], A [D, N], B and C [B, N, T], D and delta_bias [D] have to fit: {found}"
        )
