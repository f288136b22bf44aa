"""Gated MLPs that are found by running them: their layer, which projection is gate, up and down, and what is called."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from itertools import permutations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels_ext_npu.catalogue import MLPS
from kernels_ext_npu.patterns.mlps import ACTIVATED_BY
from kernels_ext_npu.reasons import Reason
from kernels_ext_npu.recognition.computed import Computed, NotRecognisedError, Steps
from kernels_ext_npu.recognition.mlps.leaves import Call, Dropouts, Leaf, put_leaves, read_sizes
from kernels_ext_npu.recognition.module_settings import is_linear, names_read, numbers, opaque_children
from kernels_ext_npu.recognition.watched_runs import (
    CLAMPS,
    MAGNITUDES,
    Watched,
    are_same,
    attempt,
    autocast,
    check_sizes,
    is_close,
    taken_shapes,
    takes,
)
from kernels_ext_npu.recognition.watched_runs import run as run_forward


class _Formula(NamedTuple):
    """What a layer computes of gate and up, and the numbers that it reads."""

    layer: str
    compute: Callable[[Tensor, Tensor], Tensor]
    numbers: tuple[tuple[str, float], ...] = ()


_NO_MLP = "what it gives is no product of a projection and of SiLU or GELU of another one"
_OTHER_GATE = "it is gated by another function than SiLU or GELU"
_GATE_LAST = Reason("no operator", "no operator: the gate is the second half, and the operator takes SiLU of the first")
# activations that no layer has, by which an MLP may be gated all the same
_OTHERS = frozenset({"relu", "leaky_relu", "elu", "softplus", "mish", "hardswish", "hardsigmoid", "glu"})
_HALVES = {"chunk", "split", "unbind", "narrow"}
_PLAIN = [_Formula(layer, lambda gate, up, act=act: act.forward(gate) * up) for layer, act in ACTIVATED_BY.items()]  # type: ignore[misc]


def _clamped(limit: float) -> _Formula:
    return _Formula(
        "ClampedSwiGLUMLP",
        lambda gate, up: F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit),
        (("limit", limit),),
    )


def _scaled(factor: float) -> _Formula:
    return _Formula("ScaledSwiGLUMLP", lambda gate, up: F.silu(gate * factor) * up, (("gate_multiplier", factor),))


def find_gated_mlp(module: nn.Module) -> Computed | None:
    """Return the layer of a gated MLP, its projections, of which gate and up may be halves of one, and its dropouts.

    The down projection may be elsewhere, and all of them. What is given beside x may be added in the end.
    """
    opaque: dict[str, Any] = opaque_children(module)
    sizes = {name: each for name, child in opaque.items() if (each := read_sizes(child)) is not None}
    adds = not takes(module, 1)
    if len(sizes) > 3 or any(each is not None for each in module._parameters.values()) or not takes(module, 1 + adds):
        return None
    names = names_read(type(module), type(module).forward)  # type: ignore[arg-type]
    if len(sizes) < 2 and _HALVES.isdisjoint(names):
        return None  # a module may be there for what else it does, and is not run for a try
    widest, watch = max((each for pair in sizes.values() for each in pair), default=64), Watched(CLAMPS | _OTHERS)

    def run(x: Tensor, magnitude: float = 1.0, training: bool = False) -> tuple[dict[Any, Leaf], Tensor, list[Tensor]]:
        noise = [*(magnitude * torch.randn(len(opaque) + 4, 2, widest, dtype=torch.float64))]
        leaves: dict[Any, Leaf] = {name: Leaf(noise.pop(), child, sizes.get(name)) for name, child in opaque.items()}
        children = put_leaves(module, leaves, training)
        added = [magnitude * torch.randn_like(x)] if adds else []
        for each in added:
            each.requires_grad_(torch.is_grad_enabled())
        with Dropouts(leaves, training, noise):
            return leaves, run_forward(module, x, *added, children=children, training=training, watch=watch), added

    for width, _ in collections.Counter(size for size, _ in sizes.values() or [(widest, 0)]).most_common():
        shapes = taken_shapes(lambda *tokens, width=width: run(torch.randn(*tokens, width)))  # type: ignore[misc]
        if shapes:
            break
    else:
        return None
    xs = [torch.randn(*tokens, width, dtype=torch.float64) for tokens in shapes]
    wider = torch.randn(*shapes[0], 2 * width, dtype=torch.float64)
    if not sizes and attempt(run, wider) is not None:  # nothing says that it is for one width
        xs.append(wider)
    with autocast(True):
        watch.autocast = True
        leaves, *_ = run(xs[0])
        watch.autocast = False
    if not all(leaf.is_cast for leaf in leaves.values() if leaf.seen):  # by the layer they would be called with it
        raise NotRecognisedError("it turns autocast off around what it calls")
    watch.called.clear()
    run(xs[0])
    clamps = sum(name in CLAMPS for name in watch.called)
    written = {float(number) for number in numbers(module) if 0 < abs(number) < 1e9}
    formulas = [*map(_clamped, (n for n in written if n > 0))] if clamps else [*_PLAIN, *map(_scaled, written - {1.0})]
    found: dict[Computed, _Formula] = {}
    probes = [(xs[0], torch.float64, *each) for each in product(MAGNITUDES, (False, True), (False, True))]
    probes += [(x, torch.float64, 1.0, False, False) for x in xs[1:]]
    probes += [(xs[0], dtype, 1.0, False, False) for dtype in (torch.bfloat16, torch.float16)]
    for number, (given, dtype, magnitude, training, with_grad) in enumerate(probes):  # one may ask for the dtype
        given = given.to(dtype, copy=True).requires_grad_(with_grad)
        with torch.set_grad_enabled(with_grad):
            read = dict(_read(*run(given, magnitude, training), given, formulas, written))
        found = {each: formula for each, formula in read.items() if not found or each in found}
        formulas = [*found.values()]
        if not found and not number:
            with torch.enable_grad():
                is_gated = _is_gated(*run(given)[:2])
            raise NotRecognisedError(_OTHER_GATE if is_gated else _NO_MLP, MLPS if is_gated else None)
        if not found:
            raise NotRecognisedError(_why(dtype, training, with_grad), MLPS)
    if len(found) > 1 or clamps not in (0, 2):  # a third may have a limit that is not reached here
        raise NotRecognisedError("it clamps in another way", MLPS)
    (computed,) = found
    check_sizes(lambda given: run(given)[1], *(5, 7, 11)[: len(shapes[0])], width)
    if adds and watch.returned is not None:
        return None
    return computed._replace(returned=watch.returned, adds=adds)


def _why(dtype: torch.dtype, training: bool, with_grad: bool) -> str:
    """Return what an MLP was seen to do that none does which is known."""
    if dtype is not torch.float64:
        return f"it computes otherwise in {str(dtype).removeprefix('torch.')}"
    if training:
        return "it computes otherwise in training"
    if with_grad:
        return "its gradients are other ones"
    return "it computes otherwise of other numbers or shapes"


def _is_gated(leaves: dict[Any, Leaf], y: Tensor) -> bool:
    """Tell whether something is one projection, or half of it, times what depends on the other one or half."""
    linear = [leaf for leaf in leaves.values() if leaf.sizes is not None and len(leaf.seen) == 1]
    given = [leaf.given[0] for leaf in linear]
    for made in (y, *(leaf.seen[0] for leaf in linear)):
        sources = [each for each in given if each.shape[-1] in (made.shape[-1], 2 * made.shape[-1])]
        if made.requires_grad and sources:
            found = torch.autograd.grad(made.sum(), sources, retain_graph=True, allow_unused=True)
            pairs = [(x, dx) for x, dx in zip(sources, found) if dx is not None]
            parts = [part for x, dx in pairs for part in zip(*(each.split(made.shape[-1], -1) for each in (x, dx)))]
            if len(parts) == 2 and any(is_close(made, x * dx) for x, dx in parts):
                return True
    return False


def _read(
    leaves: dict[Any, Leaf],
    y: Tensor,
    added: list[Tensor],
    x: Tensor,
    formulas: list[_Formula],
    written: set[float],
) -> Iterator[tuple[Computed, _Formula]]:
    """Yield how children make a gated MLP."""
    linear = {name: leaf for name, leaf in leaves.items() if leaf.sizes is not None}
    if any(len(leaf.seen) != 1 for leaf in linear.values()):
        return
    others = [call for name, leaf in leaves.items() if leaf.sizes is None for call in leaf.calls(name)]
    ahead, start = _follow(others, x, [x], x)
    ins = {name: leaf.given[0] for name, leaf in linear.items() if _is_passed(leaf.seen[0], start, [start], leaf)}
    down = next((name for name in linear if name not in ins), None)
    if len(linear) > len(ins) + (down is not None) or y.shape[:-1] != x.shape[:-1]:
        return
    ins = ins or {None: start}
    pairs = [(*pair, 1) for pair in permutations(ins)] if len(ins) == 2 else [(*ins, *ins, step) for step in (1, -1)]
    for (gate, up, step), formula in product(pairs, formulas):
        first, second = (ins[gate], ins[up]) if gate != up else ins[gate].chunk(2, -1)[::step]
        left = [*others]
        between: Steps = ()
        trunk, arguments = formula.compute(first, second), [*ins.values()]
        if down is not None:
            between, trunk = _follow(left, trunk, arguments, x)
            if not _is_passed(linear[down].seen[0], trunk, [trunk] if between else arguments, linear[down]):
                continue
            trunk, arguments = linear[down].given[0], linear[down].given
        behind, trunk = _follow(left, trunk, arguments, x)
        for factor in (1.0, *(written - {1.0})) if not left else ():
            expected = sum(added, trunk * factor)
            if _is_passed(y, expected, [*([trunk] if behind else arguments), *added]):
                is_dropped = len(between) == 1 and isinstance(leaves[between[0]].child, (nn.Dropout, type(None)))
                is_apart = step < 0 and bool(between)  # no layer has it so: the rest is called behind the product
                names = gate, up, None if is_apart else down
                found = _computed(formula, names, () if is_apart else between, is_dropped, factor)
                rest: Steps = (*between, down, *behind) if is_apart else behind  # type: ignore[arg-type]
                if found is not None and step < 0:
                    found = _with_gate_last(found)
                if found is not None and (factor == 1 or not rest):
                    yield found._replace(ahead=ahead, behind=rest), formula


def _follow(left: list[Call], trunk: Tensor, arguments: list[Tensor], x: Tensor) -> tuple[Steps, Tensor]:
    """Return what is called one after the other from a tensor on, which is taken out of ``left``, and what it gives."""
    steps: list[Any] = []
    while True:
        calls = [call for call in left if call.seen.shape[:-1] == x.shape[:-1]]
        following = next((call for call in calls if _is_passed(call.seen, trunk, arguments)), None)
        if following is None:
            return tuple(steps), trunk
        steps.append(following.name)
        left.remove(following)
        trunk = following.given
        arguments = [trunk]


def _is_passed(found: Tensor, expected: Tensor, arguments: list[Tensor], leaf: Leaf | None = None) -> bool:
    """Tell whether a tensor is what another one is computed as, which depends on some.

    Its tokens may lie otherwise, unless it is given to what may not compute them one by one.
    """
    if found.shape[:-1] != expected.shape[:-1] and leaf is not None and not is_linear(leaf.child):
        return False
    if found.shape[-1] != expected.shape[-1] or (found.dtype is not expected.dtype and expected.dtype.itemsize < 4):
        return False
    return are_same(found.flatten(0, -2), expected.flatten(0, -2), arguments)


def _with_gate_last(computed: Computed) -> Computed:
    """Return what computes the same of halves in the other order, of which operators of GELU activate either."""
    if computed.layer == "FusedSwiGLUMLP":
        return computed._replace(refused=_GATE_LAST)
    return computed._replace(numbers=(("gate_is_last", True),))


def _computed(
    formula: _Formula, names: tuple[str | None, str | None, str | None], between: Steps, is_dropped: bool, factor: float
) -> Computed | None:
    """Return the layer that computes a formula and what is called behind it, times a factor; None if there is none."""
    gate, up, down = names
    activation = ACTIVATED_BY.get(formula.layer)
    if (formula not in _PLAIN or factor != 1) and (between or gate == up):
        return None
    if gate == up and between:
        return Computed("FusedDropoutMLP", (), (("Wi", gate), ("Wo", down)), activation, between=("drop", between))
    if gate == up:
        return Computed(f"Fused{formula.layer}", projections=(("gate_up_proj", gate), ("down_proj", down)))
    projections = ("gate_proj", gate), ("up_proj", up), ("down_proj", down)
    if between:
        layer, role = ("DropoutMLP", "dropout") if is_dropped else ("NormedMLP", "ffn_sub_norm")
        return Computed(layer, (), projections, activation, between=(role, between))
    if factor != 1 or formula.layer == "ScaledSwiGLUMLP":
        if formula.layer not in ("ScaledSwiGLUMLP", "SwiGLUMLP"):
            return None
        scales = *(formula.numbers or (("gate_multiplier", 1.0),)), ("down_multiplier", factor)
        return Computed("ScaledSwiGLUMLP", (), projections, numbers=scales)
    return Computed(formula.layer, (), projections, numbers=formula.numbers)
