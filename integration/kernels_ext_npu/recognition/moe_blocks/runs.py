"""Run a block with a list of experts on random numbers, in the place of all that it calls too."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kernels_ext_npu.recognition.computed import NotRecognisedError
from kernels_ext_npu.recognition.module_settings import is_plain
from kernels_ext_npu.recognition.moe_blocks.children import AnyOperator, Gate, expert_stub, gate_stub
from kernels_ext_npu.recognition.moe_blocks.formulas import AddedLoss, Balance, Choice, Experts, Routed, gained
from kernels_ext_npu.recognition.watched_runs import ROUNDINGS, are_same, is_close, run

_SOMETHING_ELSE = "it returns something else than the sum of what experts give and what its gate does"


class Parts(NamedTuple):
    """The parts of a block: its children, and the name of what it has of one number an expert: a bias or gains."""

    module: nn.Module
    experts: Experts
    gate: Gate
    shared: tuple[str, ...]
    shared_gate: str | None
    own: str | None


class Probe(NamedTuple):
    """What a block is tried with."""

    tokens: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    magnitude: float = 1.0
    weight: float = 1.0  # weights of experts are smaller than that
    is_crowded: bool = False  # all tokens go to the same experts
    with_grad: bool = False
    is_cast: bool = False  # autocast is on around it


class BlockRun:
    """One run of a block."""

    def __init__(self, parts: Parts, probe: Probe, width: int, training: bool) -> None:
        module, experts, number = parts.module, parts.experts, parts.experts.number
        self.parts, self.probe = parts, probe
        self.x = x = (probe.magnitude * torch.randn(*probe.tokens, width)).to(probe.dtype)
        self._rows = rows = x.numel() // width
        self._noise = probe.magnitude * torch.randn(number + max(1, len(parts.shared)) + 1, 2, width)
        self._own = torch.rand(number)
        self._gives = self._draw(parts.gate, training)
        gate, stubs = gate_stub(self._gives, parts.gate.keeps_sequences), [expert_stub(*each) for each in self._noise]
        self._shared, self._weighing = stubs[number:-1], expert_stub(*self._noise[-1, :, :1])
        children: dict[Any, nn.Module] = {experts.name: nn.ModuleList(stubs[:number]), parts.gate.name: gate}
        children[parts.shared_gate] = self._weighing
        for name, is_listed, _ in (path.partition(".") for path in parts.shared):
            children[name] = nn.ModuleList(self._shared) if is_listed else self._shared[0]
        self._arguments = [
            x,
            *(each for each in self._parts_given() if isinstance(each, Tensor) and each.is_floating_point()),
            *([self._own] if parts.own in module._parameters else []),
        ]
        for each in self._arguments if probe.with_grad else ():
            each.requires_grad_()
        children = {name: child for name, child in children.items() if name is not None}
        held = {**module._parameters, **module._buffers}
        watch = AnyOperator()
        watch.autocast = probe.is_cast
        with torch.set_grad_enabled(probe.with_grad):
            tensors = {name: self._own.view(each.shape) for name, each in held.items() if each is not None}
            members: dict[str, Any] = {}
            result = run(module, x, tensors=tensors, children=children, training=training, watch=watch, written=members)
        (seen,) = gate.seen or (None,)
        # whether the gate got float32 where the block got less
        self.widens = seen is not None and seen.dtype is torch.float32 and x.dtype is not torch.float32
        if seen is None or not (self.widens or seen.dtype is x.dtype) or seen.requires_grad is not x.requires_grad:
            raise NotRecognisedError("its gate is given something else")
        if not torch.equal(seen.reshape(rows, -1), x.to(seen.dtype).reshape(rows, -1)):
            raise NotRecognisedError("its gate is given something else")
        self.takes_rows = seen.dim() < x.dim()  # whether the gate got ``[T, H]``
        self.shares_rows = all(each.dim() < x.dim() for each in self._shared[0].seen)  # whether that of all tokens did
        given = [tokens.numel() // width for each in stubs[:number] for tokens in each.seen]
        self.top_k = parts.gate.top_k or sum(given) // rows
        # whether autocast was on, if it was around the block, wherever the block called
        self.is_cast = all(each.is_cast for each in (gate, *stubs, self._weighing))
        self._y: Tensor | None = None
        self._loss: Tensor | None = None
        returned = self._read(result)
        # what it returned, and what it wrote, as `Mode` has both; `Balance` itself for a loss
        self.structure = returned, tuple((name, self._read(each)) for name, each in members.items())
        if self._y is None or self._y.dtype is not x.dtype:
            raise NotRecognisedError(_SOMETHING_ELSE)

    def agrees(self, is_detached: bool, loss: int | None, choice: Choice | None) -> bool:
        """Tell whether the output is the sum of what experts give, and the gradients are those of that."""
        with torch.set_grad_enabled(self.probe.with_grad):
            expected = self._sum(is_detached, loss, choice)
        limit = (self.top_k + 8) * torch.finfo(self.x.dtype).eps  # of as many roundings, each of half a unit
        y: Any = self._y
        unknown = y.isnan() & expected.isnan()  # scores of a sigmoid that are all zero, divided by their sum
        if not is_close(y.masked_fill(unknown, 0), expected.masked_fill(unknown, 0), max(limit, 1e-5)):
            return False
        if not self.probe.with_grad:
            return True
        if not y.requires_grad or not expected.requires_grad:
            return y.requires_grad is expected.requires_grad
        grad, how = torch.randn_like(expected), {"retain_graph": True, "materialize_grads": True, "allow_unused": True}
        theirs, ours = (torch.autograd.grad(each, self._arguments, grad, **how) for each in (y, expected))  # type: ignore[arg-type]
        return all(is_close(a, b, 1e-4) for a, b in zip(theirs, ours))

    def _draw(self, gate: Gate, training: bool) -> Any:
        """Return what the gate gives, of the dtypes of what it returned."""
        number, probe, rows = self.parts.experts.number, self.probe, self._rows
        if gate.index_at is None:
            logits = probe.magnitude * torch.randn(1 if probe.is_crowded else rows, number).expand(rows, -1)
            returned = gate.returned.get((training, probe.dtype))
            return logits.to(probe.dtype if returned is None else returned.dtype).clone()
        returned = gate.returned[training, probe.dtype]
        index = torch.rand(1 if probe.is_crowded else rows, number).topk(gate.top_k, -1)[1].expand(rows, -1).clone()
        values = []
        for place, each in enumerate(returned):
            if isinstance(each, Tensor):
                shape = (rows, *each.shape[1:]) if each.dim() and len(each) == 6 else each.shape
                drawn = probe.weight * torch.rand(shape)
                each = index.to(each.dtype) if place == gate.index_at else drawn.to(each.dtype)
            values.append(each)
        return type(returned)(values)

    def _parts_given(self) -> Any:
        return self._gives if isinstance(self._gives, (tuple, list)) else [self._gives]

    def _read(self, result: Any) -> Any:
        """Return what a part of the result is, or an attribute is set to, and keep the output and a loss."""
        if type(result) is tuple:
            return tuple(map(self._read, result))
        if not isinstance(result, Tensor):
            if is_plain(result):
                return result
            raise NotRecognisedError(_SOMETHING_ELSE)
        if result.dim() == 0 and self.parts.gate.index_at is None and (self._loss is None or self._loss is result):
            self._loss = result
            return Balance
        for place, each in enumerate(self._parts_given()):
            if isinstance(each, Tensor) and each.dtype is result.dtype and _has_values(result, each):
                is_by_sequence = result.shape != each.shape
                is_lost = result.requires_grad is not each.requires_grad
                if is_lost or (is_by_sequence and result.shape[:-1] != self.x.shape[:-1]):
                    raise NotRecognisedError(_SOMETHING_ELSE)
                return Routed(place, is_by_sequence)
        if self._y is not None or result.shape != self.x.shape:
            raise NotRecognisedError(_SOMETHING_ELSE)
        self._y = result
        return ...

    def find_balance(self, choice: Choice | None, named: set[float]) -> Balance | None:
        """Return which loss it gave, whose factor is made of numbers that it names; None without one."""
        if self._loss is None or choice is None:
            return None
        number, top_k = self.parts.experts.number, self.top_k
        factors = [0.0, *(a * b for a in (1.0, *named) for b in (1, number, 1 / top_k, number / top_k))]
        found = (Balance(each) for each in factors)
        return next((each for each in found if self.balances(each, choice)), None)

    def balances(self, balance: Balance | None, choice: Choice | None) -> bool:
        """Tell whether it gave a loss, and its gradient is that of it; without one, whether it gave none."""
        theirs, logits = self._loss, self._gives
        if theirs is None or balance is None or choice is None:
            return theirs is None
        with torch.set_grad_enabled(self.probe.with_grad):
            _, index = choice.choose(logits, None if choice.bias is None else self._own)
            ours = balance.compute(choice, logits, index)
        limit = ROUNDINGS * torch.finfo(theirs.dtype if choice.is_wide else logits.dtype).eps
        if ours.dtype is not theirs.dtype or ours.requires_grad is not theirs.requires_grad:
            return False
        if not is_close(theirs, ours, limit):
            return False
        return not ours.requires_grad or are_same(theirs, ours, [logits])

    def _sum(self, is_detached: bool, loss: int | None, choice: Choice | None) -> Tensor:
        x, gate = self.x, self.parts.gate
        if choice is None:
            index, weights = self._gives[gate.index_at], self._gives[gate.weights_at]
        else:
            weights, index = choice.choose(self._gives, None if choice.bias is None else self._own)
            weights = weights if choice.gains is None else gained(weights, index, self._own)
        base, slope = self._noise[:, 0][index], self._noise[:, 1][index]
        given = (base + slope * x.reshape(-1, 1, x.shape[-1]).roll(1, -1)).to(x.dtype)
        y = (given * weights.unsqueeze(-1)).sum(1).view(x.shape)
        y = y.detach() if is_detached else y
        y = y.to(x.dtype) if loss is None else AddedLoss.apply(y.to(x.dtype), self._gives[loss])
        if not self.parts.shared:
            return y
        more = sum(each.compute(x) for each in self._shared)
        return y + (more if self.parts.shared_gate is None else torch.sigmoid(self._weighing.compute(x)) * more)


def _has_values(result: Tensor, given: Tensor) -> bool:
    """Tell whether a tensor has the values of another one, in whatever shape."""
    return result.numel() == given.numel() and torch.equal(given.reshape(result.shape), result)
