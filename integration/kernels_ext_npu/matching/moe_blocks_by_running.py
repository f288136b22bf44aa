"""Blocks that send tokens to experts in a list, found by running them: however they loop over the experts.

Such a loop is no straight line, since the host reads how many tokens an expert gets. So a block runs with random
experts, gates and tokens in the place of its own: one token and many, with experts of their own and all with the same,
so that a capacity shows, and more than any number that its code names. What comes out has to be the sum of what the
experts of each token give, times its weights; and so have the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kernels_ext_npu.matching.computed import Computed, Recognised
from kernels_ext_npu.matching.module_settings import is_linear, is_setting, numbers, read_settings
from kernels_ext_npu.matching.moe_block_children import AnyOperator, Gate, GateStub, Stub, read_experts, read_gate
from kernels_ext_npu.matching.moe_blocks import AddedLoss, Choice, Experts, Mode, MoEBlock, Routed, possible_choices
from kernels_ext_npu.matching.watched_runs import (
    MAGNITUDES,
    NotRecognisedError,
    attempt,
    is_close,
    run,
    takes,
)
from kernels_ext_npu.reasons import Reason

_WIDTH = 8  # of tokens, unless a block asks for its own
_MANY = 4096  # tokens, up to which a number in the code of a block is tried
_LARGEST = 2**22  # values in what is tried


def find_moe_block(recognise: Callable[[nn.Module], Recognised | str | None], module: nn.Module) -> Computed | None:
    """Return what a block with a list of experts computes, or why that is no weighted sum of theirs; None of others.

    Of its other children one returns the experts of each token and their weights, or logits. Others may be an expert of
    all tokens, and a projection to one value, whose sigmoid weighs that.
    """
    experts = read_experts(module, recognise)
    own = {name: each for name, each in {**module._parameters, **module._buffers}.items() if each is not None}
    if experts is None or not takes(module, 1) or [p.numel() for p in own.values()] not in ([], [experts.number]):
        return None
    others = {name: child for name, child in module._modules.items() if child is not None and name != experts.name}
    gates = [gate for name, child in others.items() if (gate := read_gate(name, child, experts)) is not None]
    if len(gates) != 1:
        return None
    (gate,) = gates
    shared = [name for name, child in others.items() if name != gate.name and not is_linear(child)]
    weighing = [name for name, child in others.items() if name != gate.name and is_linear(child)]
    if max(len(shared), len(weighing)) > 1 or (weighing and others[weighing[0]].out_features != 1):
        return None
    trial = _Trial(module, experts, gate, next(iter(shared), None), next(iter(weighing), None))
    block = trial.block()
    refused = (
        Reason("unknown", f"its experts are computed one after the other: {trial.seen}") if block is None else None
    )
    return Computed("GatedMoEBlock", block=block, refused=refused)


class _Probe(NamedTuple):
    """What a block is tried with."""

    tokens: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    magnitude: float = 1.0
    is_crowded: bool = False  # all tokens go to the same experts
    with_grad: bool = False


class _Trial:
    """Tries a block, and tells what it computes."""

    def __init__(
        self, module: nn.Module, experts: Experts, gate: Gate, shared: str | None, shared_gate: str | None
    ) -> None:
        self.module, self.experts, self.gate = module, experts, gate
        self.shared, self.shared_gate = shared, shared_gate
        held = {**module._parameters, **module._buffers}
        own = next((name for name, each in held.items() if each is not None), None)
        self.bias = own, None if own is None else torch.rand(experts.number)
        self.seen = "what it gives is not the weighted sum of what they give"  # why it is not known
        self.top_k, self.takes_rows, self.shares_rows, self.width = gate.top_k, False, False, _WIDTH

    def block(self) -> MoEBlock | None:
        """Return what the block computes in both modes, or in one of them."""
        shapes: list[tuple[int, ...]] = []
        for width in (_WIDTH, self.experts.width):
            self.width = width
            shapes = [
                tokens for tokens in ((2, 3), (6,)) if self._attempt(self._run, _Probe(tokens), False) is not None
            ]
            if shapes:
                break
        if not shapes or self.top_k == 0:
            return None
        named = [n + 1 for n in self._named(int) if 1 < n <= _MANY and n * self.width < _LARGEST]
        ahead = (1,) * (len(shapes[0]) - 1)
        probes = [_Probe(tokens) for tokens in shapes]
        probes += [_Probe(shapes[0], with_grad=True)]
        probes += [_Probe(shapes[0], magnitude=magnitude) for magnitude in MAGNITUDES]
        probes += [_Probe((*ahead, number)) for number in (1, *named)]
        probes += [_Probe((*ahead, 64), is_crowded=True)]
        probes += [
            _Probe(shapes[0], dtype, magnitude) for dtype in (torch.bfloat16, torch.float16) for magnitude in (1e-2, 1)
        ]
        found: dict[bool, tuple[Mode, Choice | None]] = {}
        for training in (False, True):
            terms = self._attempt(self._find_mode, probes, training)
            if terms is not None:
                found[training] = terms
        choices = {choice for _, choice in found.values()}
        if len(choices) != 1:
            return None
        gate = self.gate
        return MoEBlock(
            experts=self.experts,
            gate=gate.name,
            gate_settings=gate.settings,
            takes_rows=self.takes_rows,
            index_at=gate.index_at,
            weights_at=gate.weights_at,
            top_k=self.top_k,
            choice=choices.pop(),
            shared=None if self.shared is None else (self.shared, self.shares_rows),
            shared_gate=self.shared_gate,
            modes=tuple((training, mode) for training, (mode, _) in found.items()),
        )

    def _named(self, kind: type) -> set[Any]:
        """Return the numbers of a kind that the code of the block names or reads."""
        settings = read_settings(self.module)
        members = settings.members if settings is not None else ()
        return numbers(self.module, kind) | {value for _, value in members if type(value) is kind}

    def _attempt(self, find: Callable[..., Any], *arguments: Any) -> Any:
        """Return what is found; None if a forward raises, or does what none does that is known, which is kept."""

        def noting() -> Any:
            try:
                return find(*arguments)
            except NotRecognisedError as error:
                self.seen = str(error)
                raise

        return attempt(noting)

    def _find_mode(self, probes: list[_Probe], training: bool) -> tuple[Mode, Choice | None] | None:
        """Return what the block does in training or not, if it does it with all probes."""
        choices: list[Any] = [None]
        if self.gate.index_at is None:
            choices = [*possible_choices(self.top_k, self._named(float), self.bias[0])]
        given = self.gate.returned.get((training, torch.float32), ())
        losses = [p for p, each in enumerate(given) if isinstance(each, Tensor) and each.numel() == 1]
        terms = [*product((False, True), (None, *losses), choices)]
        structures = []
        for probe in probes:
            seen = self._run(probe, training)
            terms = [each for each in terms if seen.agrees(*each)]
            structures.append(seen.structure)
            if not terms or seen.structure != structures[0]:
                return None
        is_detached, loss, choice = terms[0]
        return Mode(is_detached, loss, structures[0]), choice

    def _run(self, probe: _Probe, training: bool) -> _Seen:
        """Run the block with random numbers in the place of all that it calls."""
        number, experts, dtype = self.experts.number, self.experts, probe.dtype
        x = (probe.magnitude * torch.randn(*probe.tokens, self.width)).to(dtype)
        rows, total = x.numel() // self.width, (number + 2, 2, self.width)
        noise = probe.magnitude * torch.randn(total)
        stubs = [Stub(*each) for each in noise]
        gives = self._gives(rows, probe, training)
        gate = GateStub(gives, self.gate.keeps_sequences)
        children: dict[str, nn.Module] = {experts.name: nn.ModuleList(stubs[:number]), self.gate.name: gate}
        shared, weighing = stubs[number], Stub(*noise[-1, :, :1])
        children |= {self.shared: shared} if self.shared else {}
        children |= {self.shared_gate: weighing} if self.shared_gate else {}
        arguments = [x, *(each for each in (gives if isinstance(gives, (tuple, list)) else [gives]) if _is_float(each))]
        for each in arguments if probe.with_grad else ():
            each.requires_grad_()
        with torch.set_grad_enabled(probe.with_grad):
            own: Any = {"parameters": self._own(self.module._parameters), "buffers": self._own(self.module._buffers)}
            result = run(self.module, x, **own, children=children, training=training, watch=AnyOperator())
        if len(gate.seen) != 1 or not torch.equal(gate.seen[0].reshape(rows, -1), x.reshape(rows, -1)):
            raise NotRecognisedError("its gate is called otherwise")
        self.takes_rows, self.shares_rows = gate.seen[0].dim() < x.dim(), shared.dims < x.dim()
        if self.gate.index_at is None:
            self.top_k = sum(each.rows for each in stubs[:number]) // rows
        added = [(shared if self.shared else None), (weighing if self.shared_gate else None)]
        return _Seen(self, result, x, gives, noise[:number], added, arguments, probe.with_grad)

    def _own(self, held: dict[str, Any]) -> dict[str, Tensor | None]:
        """Return random numbers in the place of the block's own bias."""
        return {name: None if each is None else self.bias[1] for name, each in held.items()}

    def _gives(self, rows: int, probe: _Probe, training: bool) -> Any:
        """Return what the gate gives, of the dtypes of what it returned."""
        number = self.experts.number
        if self.gate.index_at is None:
            logits = probe.magnitude * torch.randn(rows, number)
            if probe.is_crowded:
                logits = logits[:1].expand(rows, -1).clone()
            returned = self.gate.returned.get((training, probe.dtype))
            return logits.to(probe.dtype if returned is None else returned.dtype)
        returned = self.gate.returned[training, probe.dtype]
        index = torch.rand(1 if probe.is_crowded else rows, number).topk(self.top_k, -1)[1].expand(rows, -1).clone()
        values = []
        for place, each in enumerate(returned):
            if isinstance(each, Tensor):
                shape = (rows, *each.shape[1:]) if each.dim() and len(each) == 6 else each.shape
                each = index.to(each.dtype) if place == self.gate.index_at else torch.rand(shape).to(each.dtype)
            values.append(each)
        return type(returned)(values)


def _has_values(result: Tensor, given: Tensor) -> bool:
    """Tell whether a tensor has the values of another one, in whatever shape."""
    return result.numel() == given.numel() and torch.equal(given.reshape(result.shape), result)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


class _Seen:
    """What a block returned of random numbers."""

    def __init__(
        self, trial: _Trial, result: Any, x: Tensor, gives: Any, noise: Tensor, added: list[Any],
        arguments: list[Tensor], with_grad: bool,
    ) -> None:  # fmt: skip
        self.trial, self.x, self.noise, self.added = trial, x, noise, added
        self.gives, self.arguments, self.with_grad = gives, arguments, with_grad
        self.y: Tensor | None = None
        self.structure = self._read(result)
        if self.y is None or self.y.dtype is not x.dtype:
            raise NotRecognisedError("it returns no sum of what experts give")

    def _read(self, result: Any) -> Any:
        """Return what a part of the result is, and keep the output."""
        if type(result) is tuple:
            return tuple(map(self._read, result))
        if not isinstance(result, Tensor):
            if is_setting(result):
                return result
            raise NotRecognisedError("it returns something else")
        given = self.gives if isinstance(self.gives, (tuple, list)) else [self.gives]
        for place, each in enumerate(given):
            if isinstance(each, Tensor) and each.dtype is result.dtype and _has_values(result, each):
                is_by_sequence = result.shape != each.shape
                if is_by_sequence and result.shape[:-1] != self.x.shape[:-1]:
                    raise NotRecognisedError("it returns something else")
                return Routed(place, is_by_sequence)
        if self.y is not None or result.shape != self.x.shape:
            raise NotRecognisedError("it returns something else")
        self.y = result
        return ...

    def agrees(self, is_detached: bool, loss: int | None, choice: Choice | None) -> bool:
        """Tell whether the output is the sum of what experts give, and the gradients are those of that."""
        with torch.set_grad_enabled(self.with_grad):
            expected = self._sum(is_detached, loss, choice)
        limit = (self.trial.top_k + 8) * torch.finfo(self.x.dtype).eps  # of as many roundings, each of half a unit
        assert self.y is not None
        if not is_close(self.y, expected, max(limit, 1e-5)):
            return False
        if not self.with_grad:
            return True
        if not self.y.requires_grad or not expected.requires_grad:
            return self.y.requires_grad is expected.requires_grad
        grad = torch.randn_like(expected)
        theirs, ours = (
            torch.autograd.grad(
                each, self.arguments, grad, retain_graph=True, materialize_grads=True, allow_unused=True
            )
            for each in (self.y, expected)
        )
        return all(is_close(a, b, 1e-4) for a, b in zip(theirs, ours))

    def _sum(self, is_detached: bool, loss: int | None, choice: Choice | None) -> Tensor:
        trial, x = self.trial, self.x
        if choice is None:
            index, weights = self.gives[trial.gate.index_at], self.gives[trial.gate.weights_at]
        else:
            weights, index = choice.choose(self.gives, None if choice.bias is None else trial.bias[1])
        rows = x.reshape(-1, 1, x.shape[-1])
        base, slope = self.noise[:, 0][index], self.noise[:, 1][index]
        y = ((base + slope * rows.roll(1, -1)).to(x.dtype) * weights.unsqueeze(-1)).sum(1).view(x.shape)
        y = y.detach() if is_detached else y
        y = y.to(x.dtype) if loss is None else AddedLoss.apply(y.to(x.dtype), self.gives[loss])
        shared, weighing = self.added
        if shared is not None:
            more = shared.compute(x)
            y = y + (more if weighing is None else torch.sigmoid(weighing.compute(x)) * more)
        return y
