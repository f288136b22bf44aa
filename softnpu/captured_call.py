"""Capture one operator call: find the shapes of its results without computing it, and keep it for the replays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import _AutoDispatchBelowAutograd
from torch.utils._pytree import tree_map_only
from torch_npu import npu

from softnpu import graph_capture, randomness
from softnpu.argument_checks import unknown_values
from softnpu.host_call import HostCall, OnHost

META = torch.device("meta")


@dataclass(frozen=True)
class Operator:
    """Describe an operator on the host to a capture.

    Attributes:
        name: without namespace and overload.
        run: computes it, from a ``HostCall`` and its arguments.
        is_formula: a formula computes it, in place of torch's kernel for the CPU.
        contiguous: its results are.
        written: positions and names of the arguments that it writes to.
        outputs: names of those that may have any shape.
        prepare: turns the caller's arguments into those of the host.
    """

    name: str
    run: Callable[[HostCall, list, dict], Any]
    is_formula: bool
    contiguous: bool
    written: list[tuple[int, str]]
    outputs: list[str]
    prepare: Callable[[HostCall, tuple, dict], tuple[list, dict]]


def capture(stream: graph_capture.Stream, operator: Operator, args: tuple, kwargs: dict) -> Any:
    """Keep a call for the replays of a graph, and return what it returns: tensors that nobody has written yet."""
    call = HostCall(operator.name, contiguous=operator.contiguous, borrows=True)
    inference = torch.is_inference_mode_enabled()  # what is kept for the replays is of no mode
    with torch.inference_mode(False), _AutoDispatchBelowAutograd():
        host_args, host_kwargs = operator.prepare(call, args, kwargs)
        host_args, host_kwargs = _frozen(call, (host_args, host_kwargs))
        draws = randomness.Draws()
        with randomness.drawing(draws):
            result, stand_ins = _shapes(operator, call, host_args, host_kwargs)
        _resize(operator, call, host_args, host_kwargs, stand_ins)
        originals = {id(stand_in): host for host, stand_in in stand_ins.values()}
        results, targets = _allocate(call, result, originals, inference)
    launch = CapturedCall(operator, call, host_args, host_kwargs, targets, draws)
    storages = call.let_go()
    graph_capture.keep(stream, launch, storages)
    return results


class CapturedCall:
    """Run a captured call again: over memory that the allocator keeps, not this object."""

    def __init__(
        self, operator: Operator, call: HostCall, args: list, kwargs: dict, targets: Any, draws: randomness.Draws
    ) -> None:
        self.name = operator.name
        self._operator, self._call, self._args, self._kwargs = operator, call, args, kwargs
        self._targets, self._draws = targets, draws

    def __call__(self) -> None:
        """Compute the operator, into the results that the captured call returned."""
        kwargs = dict(self._kwargs)
        with randomness.drawing(self._draws):
            result = self._operator.run(self._call, list(self._args), kwargs)
        for key in self._operator.outputs:
            if kwargs[key] is not self._kwargs[key]:  # written to memory of its own
                self._kwargs[key].copy_(kwargs[key])
        _copy(self.name, result, self._targets)

    def end_of_capture(self) -> None:
        """Note how far the generators are that the graph draws from."""
        self._draws.end_of_capture()


def _frozen(call: HostCall, arguments: Any) -> Any:
    """Copy the host's tensors among the arguments: a launch takes their values along. Pinned memory is read later."""

    def freeze(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if id(tensor) in call.originals or tensor.is_pinned() else tensor.clone()

    return tree_map_only(torch.Tensor, freeze, arguments)


def _shapes(operator: Operator, call: HostCall, args: list, kwargs: dict) -> tuple[Any, dict[int, tuple]]:
    """Return results of the right shapes, and stand-ins for the arguments, which an operator may return or resize.

    torch's operators say it by their meta kernels. A formula says it, and refuses what the device refuses, when it
    computes from zeros; so does an operator without a meta kernel.
    """
    makers = [_zeros] if operator.is_formula else [_meta, _zeros]
    for make in makers:
        stand_ins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def stand_in(host: torch.Tensor) -> torch.Tensor:
            if id(host) not in call.originals:
                return host
            return stand_ins.setdefault(id(host), (host, make(host)))[1]  # noqa: B023

        own_args, own_kwargs = tree_map_only(torch.Tensor, stand_in, (args, kwargs))
        randomness.again()
        try:
            scratch = HostCall(operator.name, call.contiguous)
            scratch.device = call.device
            scratch.originals = {id(s): (s, s) for _, s in stand_ins.values()}
            with unknown_values():
                result = operator.run(scratch, own_args, own_kwargs)
        except Exception:
            if make is makers[-1]:
                raise
        else:
            for key in operator.outputs:  # where it had to write to memory of its own
                host = kwargs[key]
                if id(host) in stand_ins:
                    stand_ins[id(host)] = host, own_kwargs[key]
            return result, stand_ins
    raise AssertionError("the last way returns or raises")


def _meta(host: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=META)


def _zeros(host: torch.Tensor) -> torch.Tensor:
    span = 1 + sum((size - 1) * stride for size, stride in zip(host.size(), host.stride())) if host.numel() else 0
    fresh = torch.zeros(span, dtype=host.dtype).as_strided(host.size(), host.stride())
    if hasattr(host, "needs_gradient"):
        fresh.needs_gradient = host.needs_gradient  # type: ignore[attr-defined]
    return fresh


def _resize(operator: Operator, call: HostCall, args: list, kwargs: dict, stand_ins: dict[int, tuple]) -> None:
    """Give the arguments that are written to the shapes that the operator gives them."""
    for position, key in operator.written:
        values: Any = args if position < len(args) else kwargs
        index: Any = position if position < len(args) else key
        host = values[index] if values is args or index in values else None
        if not isinstance(host, torch.Tensor) or id(host) not in stand_ins:
            continue
        new = stand_ins[id(host)][1]
        if new.size() == host.size():
            continue
        original = call.originals[id(host)][1]
        original.resize_(new.size())
        values[index] = call.alias(original)
        stand_ins[id(host)] = values[index], new


def _allocate(call: HostCall, result: Any, originals: dict[int, torch.Tensor], inference: bool) -> tuple[Any, Any]:
    """Return the results as NPU tensors that nobody has written, and the memory of each that a replay writes."""
    if isinstance(result, OnHost):
        return result.tensor, None
    if isinstance(result, (list, tuple)):
        pairs = [_allocate(call, item, originals, inference) for item in result]
        return type(result)([one for one, _ in pairs]), [target for _, target in pairs]
    if not isinstance(result, torch.Tensor):
        return result, None
    if id(result) in originals:
        return call.originals[id(originals[id(result)])][1], None
    stride = torch.empty(result.size(), device=META).stride() if call.contiguous else result.stride()
    device = call.device or torch.device("npu", npu.current_device())
    with torch.inference_mode(inference), _AutoDispatchBelowAutograd():
        fresh = torch.empty_strided(result.size(), stride, dtype=result.dtype, device=device)
    # What is in this memory stays there: a card writes nothing either, and the allocator may have given the memory of
    # the graph's inputs out again, which the first replay still reads.
    return fresh, call.alias(fresh)


def _copy(name: str, result: Any, target: Any) -> None:
    if isinstance(target, list):
        for one, other in zip(result, target):
            _copy(name, one, other)
    elif target is not None:
        if result.size() != target.size() or result.dtype != target.dtype:
            raise RuntimeError(
                f"{name}: captured as {tuple(target.size())} of {target.dtype}, computed as {tuple(result.size())} of "
                f"{result.dtype}: its meta kernel and its kernel do not agree"
            )
        target.copy_(result)
