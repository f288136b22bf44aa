"""Write the tables of what a rank of a mesh does, as `kernels-ext-npu inspect --tp N --ep N --fsdp N` finds it.

Layers of these models are alike, and each further one costs the same, so that three of them tell what all cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import softnpu  # noqa: F401  before torch
from documents import savings
from kernels_ext_npu.inspection.counting.counts import Collective, Counts
from kernels_ext_npu.inspection.inspecting import Inspection, inspect
from kernels_ext_npu.inspection.mesh import ONE, Mesh
from kernels_ext_npu.inspection.subject import Subject, find
from kernels_ext_npu.measuring.roofline import SOCS

MESHES = {
    "Qwen3-30B-A3B": (ONE, Mesh(ep=8, fsdp=8), Mesh(ep=8, fsdp=64)),
    "Qwen3-235B-A22B": (ONE, Mesh(ep=8, fsdp=8), Mesh(tp=4, ep=8, fsdp=16)),
}
_COUNTED = 3
_PHASES = {"forward": "forward", "step": "training step"}


@dataclass(frozen=True)
class Rank:
    """Hold what a rank holds, and what a phase costs it without kernels and with them, as a whole and for a layer."""

    weights: int
    whole: dict[str, tuple[Counts, Counts]]
    layer: dict[str, tuple[Counts, Counts]]


@cache
def tables(_: str) -> str:
    """Write a table for each model, with a column for each mesh; `docs/parallel.md` is in English."""
    return "\n".join(_table(model, meshes) for model, meshes in MESHES.items())


def rank(subject: Subject, mesh: Mesh, tokens: int = 4096) -> Rank:
    """Count a rank of a model whose layers are alike."""
    few = type(subject.config)(**subject.config.to_dict() | {"num_hidden_layers": _COUNTED})
    inspection = inspect(replace(subject, config=few), SOCS["910b3"], tokens=tokens, mesh=mesh)
    return _extended(inspection, subject.config.num_hidden_layers - _COUNTED)


def _extended(inspection: Inspection, further: int) -> Rank:
    """Add the counts of so many further layers."""
    before, after = (kernel_set.counts for kernel_set in inspection.kernel_sets)
    whole, layer, weights = {}, {}, inspection.weights
    for phase in _PHASES:
        one, other = before[phase], after[phase]
        assert one is not None
        assert other is not None
        both = [(Counts(), counts.layers[0]) for counts in (one, other)]
        for (total, alike), counts in zip(both, (one, other)):
            total.add(counts)
            total.add(alike.counts, further)
        (one, one_layer), (other, other_layer) = both
        whole[phase], layer[phase] = (one, other), (one_layer.counts, other_layer.counts)
        weights = inspection.weights + further * one_layer.weights
    return Rank(weights, whole, layer)


def _rank(model: str, mesh: Mesh) -> Rank:
    if mesh == ONE and model in savings.MODELS:
        return _extended(savings.inspected(model, 0), 0)
    return rank(find(model), mesh)


def _table(model: str, meshes: tuple[Mesh, ...]) -> str:
    ranks = [_rank(model, mesh) for mesh in meshes]
    lines = [_line(model, [_heading(mesh) for mesh in meshes]), _line("---", ["---:"] * len(meshes))]
    lines.append(_line("weights of a rank, GB", [_number(one.weights / 1e9) for one in ranks]))
    for phase, name in _PHASES.items():
        both, layer = ([getattr(one, part)[phase] for one in ranks] for part in ("whole", "layer"))
        lines += [
            _line(f"**{name}**", [""] * len(meshes)),
            _line("launches", [_pair(pair, lambda counts: counts.launches.total()) for pair in both]),
            _line("launches of a layer", [_pair(pair, lambda counts: counts.launches.total()) for pair in layer]),
            _line("GB that move", [_pair(pair, lambda counts: counts.bytes.total() / 1e9) for pair in both]),
            _line("GB of a layer", [_pair(pair, lambda counts: counts.bytes.total() / 1e9) for pair in layer]),
            _line("host waits", [_pair(pair, lambda counts: counts.waits) for pair in both]),
            _line("peak GB", [_pair(pair, lambda counts: counts.peak / 1e9) for pair in both]),
        ]
        for operator, axis in sorted({(key.operator, key.axis) for pair in both for key in pair[0].calls}):
            cells = [_sent(pair, in_layer, operator, axis) for pair, in_layer in zip(both, layer)]
            lines.append(_line(f"`{operator}`, {axis}", cells))
    return "\n".join(lines) + "\n"


def _heading(mesh: Mesh) -> str:
    sizes = [f"`--{name} {size}`" for name, size in (("tp", mesh.tp), ("ep", mesh.ep), ("fsdp", mesh.fsdp)) if size > 1]
    return f"{mesh.ranks} rank{'s' * (mesh.ranks > 1)}" + (f": {' '.join(sizes)}" if sizes else "")


def _sent(pair: tuple[Counts, Counts], layer: tuple[Counts, Counts], operator: str, axis: str) -> str:
    """Write calls and GB, of the whole and of a layer: the same without kernels and with them."""
    before, after = pair
    assert before.calls == after.calls
    assert before.messages == after.messages
    found = [key for key in before.calls if (key.operator, key.axis) == (operator, axis)]
    if not found:
        return "–"
    (key,) = found
    return f"{_traffic(before, key)} ({_traffic(layer[0], key)})"


def _traffic(counts: Counts, key: Collective) -> str:
    return f"{counts.calls[key]:,} × {_number(counts.messages[key] / 1e9)}"


def _pair(pair: tuple[Counts, Counts], value: Callable[[Counts], float]) -> str:
    before, after = (_number(value(counts)) for counts in pair)
    return before if before == after else f"{before} → {after}"


def _number(value: float) -> str:
    return (
        f"{value:,.0f}" if isinstance(value, int) or value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"
    )


def _line(first: str, cells: list[str]) -> str:
    return f"| {' | '.join([first, *cells])} |"
