"""Count what models cost with every mechanism and without each, and write the table of `docs/design.md`.

The figures stand in ``tests/data/rent.json``. `make docs` counts models with everything, and the rest anew only where
that has changed, or a mechanism is new: ``python scripts/docs.py --rent`` counts all of it.
"""

from __future__ import annotations

import softnpu  # noqa: F401  before torch

# isort: split
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, nullcontext
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from transformers import PreTrainedModel

import kernels_ext_npu
from documents.mechanisms import (
    ACTS,
    ADAPTED,
    AUTOCAST,
    DROPOUT,
    FORWARD,
    LISTS,
    MECHANISMS,
    MODELS,
    ROOT,
    TOKEN,
    Mechanism,
)
from kernels_ext_npu.catalogue import REPOSITORIES
from kernels_ext_npu.inspection import subject
from kernels_ext_npu.inspection.counting import phases
from kernels_ext_npu.inspection.counting.counts import Counts
from kernels_ext_npu.inspection.counting.dispatch import Counting
from kernels_ext_npu.inspection.counting.known_values import KnownValues
from kernels_ext_npu.measuring.estimate import estimate
from kernels_ext_npu.measuring.roofline import SOCS
from kernels_ext_npu.selftest.layers.moe_blocks_v4 import Qwen3MoeSparseMoeBlock

RECORD = ROOT / "tests" / "data" / "rent.json"
TOKENS, RANK, CHANCE = 4096, 16, 0.05
_SOC = SOCS["910b3"]
_PHASES = {FORWARD: "forward", TOKEN: phases.STATIC}

Cost = dict[str, Any]  # the workload of an estimate, launches, bytes at the peak
Costs = dict[str, dict[str, Cost | None]]  # by mechanism, "" for none of them, and act; None where it cannot be


def table(_: str) -> str:
    """Write a row for each mechanism: its lines, and the most that each act costs without it; it is in English."""
    recorded: dict[str, Costs] = json.loads(RECORD.read_text("utf-8"))
    lines = [f"| without | lines | {' | '.join(ACTS)} |", f"|---|---:|{'---:|' * len(ACTS)}"]
    for mechanism in MECHANISMS:
        cells = [_most(recorded, mechanism, act) if act in mechanism.acts else "" for act in ACTS]
        lines.append(f"| {mechanism.name} | {mechanism.lines or ''} | {' | '.join(cells)} |")
    return "".join(f"{line}\n" for line in lines)


def record(everything: bool = False) -> None:
    """Count what the record does not have, two models at a time, and write it as they come."""
    before: dict[str, Costs] = json.loads(RECORD.read_text("utf-8")) if RECORD.is_file() and not everything else {}
    names = (*MODELS, LISTS)
    found = {name: before.get(name, {}) for name in names}
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for name, costs in zip(names, pool.map(_counted, names, list(found.values()))):
            found[name] = costs
            RECORD.write_text(json.dumps(found, indent=1) + "\n")


def count(name: str, act: str, mechanism: Mechanism | None = None) -> Cost | None:
    """Count an act of a model with everything, or without a mechanism; None where peft cannot adapt the model so."""
    with ExitStack() as stack:
        if mechanism is not None:
            stack.enter_context(mechanism.left_out())
        without = () if mechanism is None else mechanism.without
        kernels_ext_npu.register(kernels=sorted({*REPOSITORIES} - {*without}))
        stack.callback(kernels_ext_npu.unregister)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        values = KnownValues()
        with Counting(values, _SOC):
            model = _build(name)
        try:
            if act in ADAPTED:
                subject.adapt(model, RANK, CHANCE if act == DROPOUT else 0.0)
        except subject.CannotInspectError:
            return None
        if act == AUTOCAST:
            _to_bfloat16(parameter for path, parameter in model.named_parameters() if "lora_" in path)
        kernels_ext_npu.kernelize(model.train(act not in _PHASES))
        inputs, _ = subject.make_inputs(model, 1, TOKENS, values)
        counts = _run(model, act, inputs, values)
    return {
        "work": {part: float(f"{amount:.6g}") for part, amount in sorted(counts.work.items())},
        "launches": counts.launches.total(),
        "peak": counts.peak,
    }


def _build(name: str) -> PreTrainedModel:
    found = subject.find(name.partition(",")[0])
    if name != LISTS:
        return subject.build(found, torch.bfloat16)
    config: Any = found.config
    config.num_hidden_layers = 4  # which is enough for a proportion
    model: Any = subject.build(found, torch.bfloat16)
    sizes = config.hidden_size, config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size
    with torch.device("npu"):
        for layer in model.model.layers:
            layer.mlp = _WithoutLogits(*sizes)
            _to_bfloat16(layer.mlp.parameters())
    return model


class _WithoutLogits(nn.Module):
    """A block with a list of experts, as transformers 4 has it, in a layer of transformers 5."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.block = Qwen3MoeSparseMoeBlock(*sizes)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Give what the block does beside the logits of its router."""
        return self.block(hidden_states)[0]


def _to_bfloat16(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:  # fake tensors cannot be moved by to()
        parameter.data = parameter.data.bfloat16()


def _run(model: PreTrainedModel, act: str, inputs: phases.Inputs, values: KnownValues) -> Counts:
    if act in _PHASES:
        return phases.count(_PHASES[act], model, inputs, values, _SOC)
    inputs = inputs | subject.labels(model, inputs)

    def step(_: Counting) -> None:
        with torch.autocast("npu", torch.bfloat16) if act == AUTOCAST else nullcontext():
            loss = model(**inputs).loss
        loss.backward()
        model.zero_grad(set_to_none=True)

    return phases.count_layers(model, inputs, lambda: Counting(values, _SOC), step)


def _counted(name: str, before: Costs) -> Costs:
    """Count a model in a process of its own; mechanisms whose figures may have changed, or are not there, anew."""
    torch.set_num_threads(1)
    acts = (FORWARD, "step", TOKEN) if name == LISTS else ACTS
    found: Costs = {"": {act: count(name, act) for act in acts}}
    for mechanism in _mechanisms(name):
        known = before.get(mechanism.name, {})
        found[mechanism.name] = {
            act: known[act] if act in known and before[""].get(act) == found[""][act] else count(name, act, mechanism)
            for act in mechanism.acts
            if found[""][act] is not None
        }
    return found


def _mechanisms(name: str) -> Iterator[Mechanism]:
    return (mechanism for mechanism in MECHANISMS if name in mechanism.models)


def _most(recorded: dict[str, Costs], mechanism: Mechanism, act: str) -> str:
    """Write the most that an act of any model costs without a mechanism, in time and at the peak."""
    times, peaks = [], []
    for model in mechanism.models:
        with_it, without = recorded[model][""].get(act), recorded[model][mechanism.name].get(act)
        if with_it is not None and without is not None:
            times.append(_seconds(act, without) / _seconds(act, with_it) - 1)
            peaks.append(without["peak"] / with_it["peak"] - 1 if act != TOKEN else 0.0)
    if not times:
        return ""
    peak = max(peaks)
    return f"{max(times):+.1%}" + (f", peak {peak:+.0%}" if peak >= 0.005 else "")


def _seconds(act: str, cost: Cost) -> float:
    """Return the estimated seconds of an act; a token is in a graph, where the host launches nothing."""
    found = estimate(cost["work"])
    return found.graph if act == TOKEN else found.seconds
