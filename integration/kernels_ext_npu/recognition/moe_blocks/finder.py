"""Blocks that send tokens to experts in a list, found by running them: however they loop over the experts.

Such a loop is no straight line, since the host reads how many tokens an expert gets. So a block runs with random
experts, gates and tokens in the place of its own: one token and many, with experts of their own and all with the same,
so that a capacity shows, and more than any number that its code names. What comes out has to be the sum of what the
experts of each token give, times its weights; and so have the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from kernels_ext_npu.matching.classification import BLOCK_NAMES
from kernels_ext_npu.reasons import Reason
from kernels_ext_npu.recognition.computed import Computed, NotRecognised, NotRecognisedError, Recognised
from kernels_ext_npu.recognition.module_settings import Settings, is_linear, numbers
from kernels_ext_npu.recognition.moe_blocks.children import longest_list, read_experts, read_gate, shared_paths
from kernels_ext_npu.recognition.moe_blocks.formulas import Balance, Choice, Experts, Mode, MoEBlock, possible_choices
from kernels_ext_npu.recognition.moe_blocks.runs import BlockRun, Parts, Probe
from kernels_ext_npu.recognition.purity import impurity
from kernels_ext_npu.recognition.watched_runs import MAGNITUDES, attempt, autocast, takes

_WIDTH = 8  # of tokens, unless a block asks for its own
_MANY = 4096  # tokens, up to which a number in the code of a block is tried
_LARGEST = 2**22  # values in what is tried
_ONE_BY_ONE = "its experts are computed one after the other"
_OTHER_EXPERTS = "they are no gated MLPs that a kernel computes"
_IN_SEVERAL_LISTS = "their projections are in several lists"
_OTHER_LOSS = "it keeps or returns a number that is no loss which balances experts"


def find_moe_block(
    recognise: Callable[[nn.Module], Recognised | NotRecognised | None], settings: Settings, module: nn.Module
) -> Computed | None:
    """Return what a block with a list of experts computes, or why that is no weighted sum of theirs; None of others.

    Of its other children one returns the experts of each token and their weights, or logits. Others may be an expert of
    all tokens, and a projection to one value, whose sigmoid weighs that.
    """
    experts = read_experts(module, recognise)
    if experts is None:
        seen = _IN_SEVERAL_LISTS if longest_list(module) is None else _OTHER_EXPERTS
        return _refused(seen) if _is_called_so(module) and _sends_to_a_list(module) else None
    parts = _read_parts(module, experts)
    if isinstance(parts, str):
        return _refused(parts) if _sends_to_a_list(module) else None
    trial = _Trial(parts, settings)
    block = trial.find()
    return _refused(trial.seen[-1].seen) if block is None else Computed("GatedMoEBlock", block=block)


def _refused(seen: str) -> Computed:
    return Computed("GatedMoEBlock", refused=Reason("unknown", f"{_ONE_BY_ONE}: {seen}"))


def _sends_to_a_list(module: nn.Module) -> bool:
    """Tell whether a block has a weight with a number for each module of its longest list."""
    lists = _lists(module)
    others = [(name, p.shape) for name, p in module.named_parameters() if name.partition(".")[0] not in lists]
    return any(max(map(len, lists.values())) in shape for _, shape in others)


def _is_called_so(module: nn.Module) -> bool:
    is_named = any("expert" in name.lower() for name in _lists(module))
    return is_named or BLOCK_NAMES.search(type(module).__name__) is not None


def _lists(module: nn.Module) -> dict[str, nn.ModuleList]:
    return {name: child for name, child in module._modules.items() if isinstance(child, nn.ModuleList)}


def _read_parts(module: nn.Module, experts: Experts) -> Parts | str:
    """Return the parts of a block with these experts, or what is otherwise than in any that is served."""
    own = {name: each for name, each in {**module._parameters, **module._buffers}.items() if each is not None}
    if not takes(module, 1):
        return "it takes more than tokens"
    if (impure := impurity(type(module), type(module).forward)) is not None:  # type: ignore[arg-type]
        return impure
    if [p.numel() for p in own.values()] not in ([], [experts.number]):
        return "it has other weights of its own"
    others: dict[str, Any] = {
        name: child
        for name, child in module._modules.items()
        if name != experts.name and child is not None and any(True for _ in child.parameters())
    }
    gates = [gate for name, child in others.items() if (gate := read_gate(name, child, experts)) is not None]
    if len(gates) != 1:
        return "no child, or several, give experts of tokens and their weights, or logits"
    (gate,) = gates
    shared = [name for name, child in others.items() if name != gate.name and not is_linear(child)]
    weighing = [name for name, child in others.items() if name != gate.name and is_linear(child)]
    if max(len(shared), len(weighing)) > 1 or (weighing and others[weighing[0]].out_features != 1):
        return "it has other children than a gate, and an expert of all tokens with its own"
    paths = shared_paths(shared[0], others[shared[0]]) if shared else ()
    each, shared_gate = (next(iter(names), None) for names in (own, weighing))
    return Parts(module, experts, gate, paths, shared_gate, each)


class _Trial:
    """Tries a block, and tells what it computes."""

    def __init__(self, parts: Parts, settings: Settings) -> None:
        self.parts, self.settings, self.width = parts, settings, _WIDTH
        # why it is not known: the last counts
        self.seen = [NotRecognised("what it gives is not the weighted sum of what they give")]

    def find(self) -> MoEBlock | None:
        """Return what the block computes in both modes, or in one of them."""
        for width in (_WIDTH, self.parts.experts.width):
            self.width = width
            firsts = {each: attempt(self._run, Probe(each), False, seen=self.seen) for each in ((2, 3), (6,))}
            shapes: list[Any] = [tokens for tokens, first in firsts.items() if first is not None]
            if shapes:
                break
        else:
            return None
        first: BlockRun = firsts[shapes[0]]
        if first.top_k == self.parts.experts.number:
            self.seen.append(NotRecognised("each of them computes every token"))
        probes = self._probes(shapes)
        found: dict[bool, dict[Choice | None, Mode]] = {}
        for training in (False, True):
            modes = attempt(self._find_modes, probes, first.top_k, training, seen=self.seen)
            if modes is not None:
                found[training] = modes
        # rounding may leave several to one of the modes
        choices = [each for each in next(iter(found.values()), {}) if all(each in modes for modes in found.values())]
        if not choices or first.top_k == 0:
            return None
        choice, *_ = choices
        training, narrow = False not in found, Probe(shapes[0], torch.bfloat16)
        with autocast(True):
            cast = attempt(self._run, narrow._replace(is_cast=True), training, seen=self.seen)
        parts, gate = self.parts, self.parts.gate
        return MoEBlock(
            experts=parts.experts,
            gate=gate.name,
            gate_settings=gate.settings,
            takes_rows=first.takes_rows,
            widens=self._run(narrow, training).widens,
            casts=cast is not None and cast.is_cast,
            index_at=gate.index_at,
            weights_at=gate.weights_at,
            top_k=first.top_k,
            choice=choice,
            shared=parts.shared,
            shares_rows=first.shares_rows,
            shared_gate=parts.shared_gate,
            modes=tuple((training, modes[choice]) for training, modes in found.items()),
        )

    def _probes(self, shapes: list[tuple[int, ...]]) -> list[Probe]:
        """Return what the block is tried with, of the shapes of tokens that it takes."""
        first, *_ = shapes
        ahead = (1,) * (len(first) - 1)
        named = [n + 1 for n in self._named(int) if 1 < n <= _MANY and n * self.width < _LARGEST]
        narrow = product((torch.bfloat16, torch.float16), (1e-2, 1.0))
        return [
            *map(Probe, shapes),
            Probe(first, with_grad=True),
            *(Probe(first, magnitude=magnitude) for magnitude in MAGNITUDES),
            *(Probe((*ahead, number)) for number in (1, *named)),
            *(Probe((*ahead, 64), weight=2 * limit) for limit in self._named(float) if 0 < limit < 1),
            Probe((*ahead, 64), is_crowded=True),
            *(Probe(first, dtype, magnitude) for dtype, magnitude in narrow),
        ]

    def _named(self, kind: type) -> set[Any]:
        """Return the numbers of a kind that the code of the block names or reads."""
        read = {frozen[1] for _, frozen in self.settings.members if frozen[0] is kind}
        return numbers(self.parts.module, kind) | read

    def _run(self, probe: Probe, training: bool) -> BlockRun:
        return BlockRun(self.parts, probe, self.width, training)

    def _find_modes(self, probes: list[Probe], top_k: int, training: bool) -> dict[Choice | None, Mode] | None:
        """Return what the block does in training or not, if it does it with all probes, by how it may choose."""
        gate = self.parts.gate
        choices: list[Any] = [None]
        if gate.index_at is None:
            named = self._named(float), self._named(int)
            choices = [*possible_choices(top_k, self.parts.experts.number, *named, self.parts.own)]
        given = gate.returned.get((training, torch.float32), ())
        losses = [p for p, each in enumerate(given) if isinstance(each, Tensor) and each.numel() == 1]
        terms = [*product((False, True), (None, *losses), choices)]
        runs: list[BlockRun] = []
        for probe in probes:
            runs.append(run := self._run(probe, training))
            terms = [each for each in terms if run.agrees(*each)]
            if not terms or run.structure != runs[0].structure:
                return None
        modes: dict[Choice | None, Mode] = {}
        for is_detached, loss, choice in terms:
            balance = runs[0].find_balance(choice, self._named(float))
            if choice not in modes and all(run.balances(balance, choice) for run in runs):
                modes[choice] = Mode(is_detached, loss, *_with_loss(runs[0].structure, balance))
        if not modes:
            raise NotRecognisedError(_OTHER_LOSS)
        return modes


def _with_loss(structure: Any, balance: Balance | None) -> Any:
    """Return what a block gave with the loss that it is in the place of `Balance`."""
    if type(structure) is tuple:
        return tuple(_with_loss(each, balance) for each in structure)
    return balance if structure is Balance else structure
