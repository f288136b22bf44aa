"""Two steps of training on several devices, and how far they are from one process. Runs in the processes."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import kernels_ext_npu
import softnpu
from tests.distributed import engines, matrix, models
from tests.distributed.models import Tensors

Remark = tuple[str, bool, str]
Sent = dict[tuple[str, tuple[int, ...]], tuple[int, int]]


@dataclass
class Counted:
    """What one process did.

    Attributes:
        calls: what the first step called on the device.
        later_calls: what the last one called; between them the model was asked to evaluate, and to train again.
        sent: the collectives of the first step: operator and ranks -> calls and bytes.
        report: class, whether it is swapped, and what is said to it: what the kernels' report has to say anything to,
            but to heads, which test_sharded_heads.py asks for.
    """

    calls: Counter[str]
    later_calls: Counter[str]
    sent: Sent
    report: set[Remark]


@dataclass
class Compared(Counted):
    """How far training is from the truth: the largest absolute difference and where it is; relative to what is right,
    the loss and all gradients of each step, and the weights; and the same of the parameter for which it is largest.
    """

    largest: dict[str, tuple[float, str]]
    relative: dict[str, float]
    worst: dict[str, float]


def compare(
    engine: str, model: str, folder: Path, truth: Path, kernels: bool, checkpointing: str = "off", **how: bool
) -> Compared:
    """Train a model on the devices of all processes, which have to call this together, and compare each with the truth.

    With checkpointing, gradients of the second step are not compared by themselves.
    """
    torch._dynamo.reset()
    found, counted = train(engine, model, folder, kernels, checkpointing, **how)
    expected: list[Tensors] = torch.load(truth)
    if checkpointing != "off":
        expected[1] = {"loss": expected[1]["loss"]}
    relative, worst = {}, {}
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        if "loss" in other:
            relative[f"loss of step {step}"] = ((one["loss"] - other["loss"]).abs() / other["loss"].abs()).item()
        kind = "weights" if step == models.STEPS else f"gradients of step {step}"
        if other.keys() - {"loss"}:
            relative[kind], worst[kind] = _relative(one, other)
    return Compared(**vars(counted), largest=_largest(found, expected), relative=relative, worst=worst)


def assert_right(compared: Compared, model: str) -> None:
    """Check that kernels compute, and that what they compute is that of one process."""
    for kind, (difference, where) in compared.largest.items():
        assert difference < matrix.TOLERANCE, f"{kind} differ by {difference:.1e} in {where}"
    for calls in (compared.calls, compared.later_calls):
        assert not matrix.FUSED[model] - calls.keys()


def count(engine: str, model: str, folder: Path, kernels: bool) -> Counted:
    """Return what a step calls and sends."""
    return train(engine, model, folder, kernels, "off", steps=1)[1]


@torch.no_grad()
def evaluate(engine: str, model: str, folder: Path) -> Tensor:
    """Return the loss of a compiled model with kernels, which is not trained."""
    torch._dynamo.reset()
    with engines.registered(True):
        _, compiled = engines.build(engine, model, folder, True, "off", compiled=True)
        ids = engines.batch(engine, model, 0)
        return _mean(compiled.eval()(ids, labels=ids, use_cache=False).loss)


def train(
    engine: str,
    model: str,
    folder: Path,
    kernels: bool,
    checkpointing: str,
    steps: int = models.STEPS,
    compiled: bool = False,
    accumulates: bool = False,
) -> tuple[list[Tensors], Counted]:
    """Train a model; returns for each step loss and gradients, and behind the last the weights, as `models.train`.

    Where it accumulates, each half of a batch has a backward of its own.
    """
    with engines.registered(kernels):
        whole, trained = engines.build(engine, model, folder, kernels, checkpointing, compiled)
        rows = kernels_ext_npu.report(whole)
        rows = [row for row in rows if row.reason is not None and row.kind != "heads"]
        report = {(row.class_name, row.swapped, row.reason) for row in rows}
        optimizer = models.optimizer_of(trained)
        found: list[Tensors] = []
        calls: list[Counter[str]] = []
        sent: Sent = {}
        for step in range(steps):
            ids = engines.batch(engine, model, step)
            softnpu.reset_counters()
            parts, loss = ids.chunk(2) if accumulates else (ids,), torch.zeros((), device=ids.device)
            for part in parts:
                with engines.accumulating(trained, is_last=part is parts[-1]):
                    part_of_loss = trained(part, labels=part, use_cache=False).loss / len(parts)
                    part_of_loss.backward()
                loss += part_of_loss.detach()
            optimizer.step()
            calls.append(Counter(softnpu.counters()))
            sent = sent or _sent()
            found.append({"loss": _mean(loss)})
            if step == 0 or checkpointing == "off":  # the others of the second step are seen in the weights
                found[-1] |= {f"gradient {name}": g for name, g in engines.gradients(trained).items()}
                trained.eval()  # as for an evaluation: transformers asks for kernels again each time
                trained.train()
            optimizer.zero_grad()
        found.append({f"weight {name}": weight for name, weight in engines.weights(trained).items()})
        return found, Counted(calls[0], calls[-1], sent, report)


def _largest(found: list[Tensors], truth: list[Tensors]) -> dict[str, tuple[float, str]]:
    """Infinity where a tensor is missing on one side, or is not finite."""
    largest = {"loss": (0.0, ""), "gradients": (0.0, ""), "weights": (0.0, "")}
    for step, (one, other) in enumerate(zip(found, truth, strict=True)):
        for name in one.keys() | other.keys():
            kind = {"gradient": "gradients", "weight": "weights"}.get(name.partition(" ")[0], name)
            both = name in one and name in other and one[name].shape == other[name].shape
            difference = (one[name] - other[name]).abs().max().item() if both else float("inf")
            difference = difference if difference == difference else float("inf")
            largest[kind] = max(largest[kind], (difference, f"{name} of step {step}"))
    return largest


def _relative(found: Tensors, truth: Tensors) -> tuple[float, float]:
    """Of all tensors as one vector, and of the one for which it is largest. The loss is none of them."""
    names = truth.keys() - {"loss"}
    wrong = {name: (found[name] - truth[name]).norm().item() for name in names}
    right = {name: truth[name].norm().item() for name in names}
    whole = _length(wrong.values()) / _length(right.values())
    return whole, max(wrong[name] / right[name] for name in names)


def _length(parts: Iterable[float]) -> float:
    return sum(part**2 for part in parts) ** 0.5


def _mean(loss: Tensor) -> Tensor:
    """Of the losses of all processes, whose batches are equally large."""
    loss = loss.float().clone()
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    return loss.cpu()


def _sent() -> Sent:
    """Groups by their ranks: their names differ from one model to the next."""
    ranks = {name: tuple(dist.get_process_group_ranks(group)) for group, name in _groups().items()}
    sent: Sent = {}
    for collective, traffic in softnpu.collectives().items():
        key = collective.operator, ranks[collective.group]
        calls, size = sent.get(key, (0, 0))
        sent[key] = calls + traffic.calls, size + traffic.bytes
    return sent


def _groups() -> dict[dist.ProcessGroup, str]:
    return dist.distributed_c10d._world.pg_names
