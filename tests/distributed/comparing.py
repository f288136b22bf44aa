"""Two steps of training on several devices, and how far they are from one process. Runs in the processes."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import kernels_ext_npu
import softnpu
from tests.distributed import engines, matrix, models
from tests.distributed.models import Tensors
from tests.distributed.parallel import largest_difference

Sent = Counter[tuple[str, tuple[int, ...], str]]


@dataclass
class Compared:
    """What one process did, and how far training is from the truth.

    Attributes:
        calls: what the first step called on the device.
        later_calls: what the last one called; between them the model was evaluated.
        sent: the collectives of the first step: calls and bytes by operator and ranks.
        report: class, whether it is swapped, and what is said to it: what the kernels' report has to say anything to,
            but to heads, which test_sharded_heads.py asks for.
        projections: how often it says what of a linear layer.
        largest: absolute difference, and where it is.
        relative: to what is right, of the loss and all gradients of each step, and of the weights behind the last.
        worst: the same of the parameter for which it is largest.
    """

    calls: Counter[str]
    later_calls: Counter[str]
    sent: Sent
    report: set[tuple[str, bool, str]]
    projections: Counter[str | None]
    largest: dict[str, tuple[float, str]]
    relative: dict[str, float]
    worst: dict[str, float]


def compare(
    engine: str,
    model: str,
    folder: Path,
    truth: list[Tensors],
    kernels: bool = True,
    checkpointing: str = "off",
    accumulates: bool = False,
    is_late: bool = False,
    **how: bool,
) -> Compared:
    """Train a model on the devices of all processes, which have to call this together, and compare each with the truth.

    With checkpointing, gradients of the second step are not compared by themselves: they are seen in the weights.
    Where it accumulates, each half of a batch has a backward of its own. Kernels that are late are swapped in behind
    the engine, before each step.
    """
    torch._dynamo.reset()
    with engines.registered(kernels):
        whole, trained = engines.build(engine, model, folder, kernels and not is_late, checkpointing, **how)
        optimizer = models.make_optimizer(trained)
        found: list[Tensors] = []
        calls: list[Counter[str]] = []
        sent: list[Sent] = []
        for step in range(models.STEPS):
            if is_late:
                kernels_ext_npu.kernelize(trained)
            ids = engines.batch(engine, model, step)
            if step:  # an evaluation in between: transformers asks for kernels again, and for them once more behind it
                trained.eval()
                with torch.no_grad():
                    evaluated = _mean(trained(ids, labels=ids, use_cache=False).loss)
                trained.train()
            softnpu.reset_counters()
            parts, loss = ids.chunk(2) if accumulates else (ids,), torch.zeros((), device=ids.device)
            for part in parts:
                with engines.accumulating(trained, is_last=part is parts[-1]):
                    part_of_loss = trained(part, labels=part, use_cache=False).loss / len(parts)
                    part_of_loss.backward()
                loss += part_of_loss.detach()
            optimizer.step()
            calls.append(Counter(softnpu.counters()))
            sent.append(_sent())
            found.append({"loss": _mean(loss)})
            if step == 0 or checkpointing == "off":
                found[-1] |= engines.named("gradient", engines.gradients(trained))
            optimizer.zero_grad()
        found.append(engines.named("weight", engines.weights(trained)))
        report = kernels_ext_npu.report(whole)
        rows = [row for row in report if row.reason is not None and row.kind != "heads"]
        remarks = {(row.class_name, row.swapped, row.reason) for row in rows}
        projections = Counter(row.reason for row in report.projections)
    if checkpointing != "off":
        truth[1] = {"loss": truth[1]["loss"]}
    largest = _largest(found, truth)
    largest["loss"] = max(largest["loss"], ((evaluated - truth[-2]["loss"]).abs().item(), "an evaluation"))
    return Compared(calls[0], calls[-1], sent[0], remarks, projections, largest, *_relative(found, truth))


def assert_right(compared: Compared, model: str) -> None:
    """Check that kernels compute, and that what they compute is that of one process."""
    for kind, (difference, where) in compared.largest.items():
        assert difference < matrix.TOLERANCE, f"{kind} differ by {difference:.1e} in {where}"
    for calls in (compared.calls, compared.later_calls):
        assert not matrix.FUSED[model] - calls.keys()


def largest(ranks: list[Compared], model: str) -> dict[str, float]:
    """Check that all are right, and return their largest differences."""
    for rank in ranks:
        assert_right(rank, model)
    return {kind: max(rank.largest[kind][0] for rank in ranks) for kind in ranks[0].largest}


def _largest(found: list[Tensors], truth: list[Tensors]) -> dict[str, tuple[float, str]]:
    """Infinity where a tensor is missing on one side, or is not finite."""
    largest = {"loss": (0.0, ""), "gradients": (0.0, ""), "weights": (0.0, "")}
    for step, (one, other) in enumerate(zip(found, truth, strict=True)):
        for name in one.keys() | other.keys():
            kind = {"gradient": "gradients", "weight": "weights"}.get(name.partition(" ")[0], name)
            difference = largest_difference(one.get(name), other.get(name))
            largest[kind] = max(largest[kind], (difference, f"{name} of step {step}"))
    return largest


def _relative(found: list[Tensors], truth: list[Tensors]) -> tuple[dict[str, float], dict[str, float]]:
    """Of all tensors of a kind as one vector, and of the one for which it is largest."""
    relative, worst = {}, {}
    for step, (one, other) in enumerate(zip(found, truth)):
        for kind in matrix.TOLERANCES_BFLOAT16:
            names = [name for name in other if kind.startswith(name.partition(" ")[0])]
            if names:
                wrong = torch.stack([(one[name] - other[name]).norm() for name in names])
                right = torch.stack([other[name].norm() for name in names])
                relative[f"{kind} of step {step}"] = (wrong.norm() / right.norm()).item()
                worst[f"{kind} of step {step}"] = (wrong / right).max().item()
    return relative, worst


def _mean(loss: Tensor) -> Tensor:
    """Of the losses of all processes, whose batches are equally large."""
    loss = loss.float().clone()
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    return loss.cpu()


def _sent() -> Sent:
    """Groups by their ranks: their names differ from one model to the next."""
    groups = dist.distributed_c10d._world.pg_names
    ranks = {name: tuple(dist.get_process_group_ranks(group)) for group, name in groups.items()}
    sent: Sent = Counter()
    for collective, traffic in softnpu.collectives().items():
        sent[collective.operator, ranks[collective.group], "calls"] += traffic.calls
        sent[collective.operator, ranks[collective.group], "bytes"] += traffic.bytes
    return sent
