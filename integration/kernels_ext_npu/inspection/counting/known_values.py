"""The values of fake tensors that follow from sizes and token ids alone: positions, masks, lengths.

Models read such values on the host, to decide which mask they need or where an image ends. Fake tensors have no values,
so operators whose inputs are all known are run a second time, on the CPU. What follows from weights stays unknown, but
for the experts that tokens are routed to: they are taken in turn. All ranks of a mesh are taken to hold the same.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from kernels_ext_npu.inspection.counting import collectives
from kernels_ext_npu.measuring.costs import LIKE
from kernels_ext_npu.measuring.distance import tensors
from kernels_ext_npu.measuring.products import operator_name

_MASKED = ("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
LARGEST = 2**25  # elements that are worth computing: more than the attention mask of 4096 tokens has
_ROUTES = ("topk", "npu_moe_gating_top_k_softmax", "npu_moe_gating_top_k")  # give values and indices
# operators whose result has a size that only values tell, and the argument with these values
_SIZED_BY = {"nonzero": 0, "repeat_interleave": 0, "unique_consecutive": 0, "_unique2": 0, "masked_select": 1}


class UnknownValueError(Exception):
    """A model reads a value on the host that follows from weights: by which operator."""


class KnownValues:
    """The values that are known of fake tensors of an NPU, kept up to date by every operator that runs through it."""

    def __init__(self) -> None:
        self.waits = self.copies_in = 0  # how often the host waited for the device, to read a value, or copied to it
        self._values = WeakIdKeyDictionary()
        self._written: set[str] = set()  # calls of operators with ``out=`` that ran, in words

    def learn(self, fake: Tensor, value: Tensor) -> Tensor:
        """Say what a fake tensor holds, and return it."""
        self._values[fake] = value
        return fake

    def run(self, operator: OpOverload, args: tuple, kwargs: dict) -> Any:
        """Run an operator, and return its result; raise UnknownValueError if that needs values that are unknown."""
        name = operator_name(operator)
        if name == "_local_scalar_dense":
            self.waits += args[0].device.type == "npu"
            value = self._value(args[0])
            if value is None:
                raise UnknownValueError(operator)
            with _disable_current_modes():
                return value.item()
        if (sizing := _sizing(operator, name, args)) is not None:
            self.waits += args[0].device.type == "npu" and kwargs.get("output_size") is None
            return self._sized_by_values(operator, sizing, args, kwargs)
        result = self._run(operator, args, kwargs)
        waits, copies_in = _crossings(name, args, kwargs, result)
        self.waits += waits
        self.copies_in += copies_in
        if name in _ROUTES:
            with _disable_current_modes():
                in_turn = torch.arange(result[1].numel()).remainder(args[0].shape[-1])
                self._values[result[1]] = in_turn.reshape(result[1].shape).to(result[1].dtype)
        elif name == "npu_moe_init_routing_v2":
            self._count_rows(args[1], kwargs, result[2])
        elif collectives.is_collective(operator):
            self._communicate(operator, args)
        elif operator.namespace == "aten":
            self._follow(operator, name, args, kwargs, result)
        return result

    def with_lists(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Return arguments with lists in the place of lengths on the host, where they are known."""

        def listed(fake: FakeTensor) -> Any:
            numbers = self.numbers(fake) if fake.device.type == "cpu" and fake.dim() == 1 else None
            return fake if numbers is None else numbers

        return tree_map_only(FakeTensor, listed, (args, kwargs))

    def numbers(self, tensor: Tensor) -> Any:
        """Return what a tensor holds as a list; None where that is not known."""
        value = self._value(tensor)
        if value is None:
            return None
        with _disable_current_modes():
            return value.tolist()

    def read_at_once(self) -> AbstractContextManager:
        """Let ``tolist()`` wait once, as on a device; fake tensors read one value after the other."""
        before = FakeTensor.tolist

        def tolist(fake: FakeTensor) -> Any:
            numbers = self.numbers(fake)
            if numbers is None:
                return before(fake)
            self.waits += fake.device.type == "npu"
            return numbers

        return patch.object(FakeTensor, "tolist", tolist)

    def _run(self, operator: OpOverload, args: tuple, kwargs: dict) -> Any:
        """Run an operator; one with ``out=`` only if it has not filled one like this from tensors like these before.

        torch keeps what it knows of other operators on fake tensors, and takes a millisecond for each of these: loops
        over experts and over the chunks of long sequences have thousands.
        """
        out = kwargs.get("out")
        if operator.namespace != "aten" or not isinstance(out, FakeTensor):
            return operator(*args, **kwargs)
        layouts = tree_map_only(Tensor, lambda t: (t.shape, t.stride(), t.dtype, t.device), (args, kwargs))
        call = f"{operator} {layouts}"
        if call not in self._written:
            operator(*args, **kwargs)
            self._written.add(call)
        return out

    def _count_rows(self, experts: Tensor, options: dict, counts: Tensor) -> None:
        """Learn how many rows go to each active expert, where an operator counts them and it is known."""
        known = self._value(experts)
        is_counted = options.get("expert_tokens_num_type") == 1 and options.get("drop_pad_mode", 0) == 0
        if known is None or not is_counted:
            return
        first, behind = options.get("active_expert_range") or (0, options["expert_num"])
        with _disable_current_modes():
            self._values[counts] = known.flatten().bincount(minlength=options["expert_num"])[first:behind]

    def _communicate(self, operator: OpOverload, args: tuple) -> None:
        """Forget what a collective writes, unless it exchanges equal parts.

        Then the result is known: each rank sends what this one sends.
        """
        if operator.namespace != "c10d":
            return  # gives new tensors
        exchanges = operator is torch.ops.c10d.alltoall_base_.default and not args[3] and not args[4]
        for written in tensors(args[:1] if exchanges else args):
            self._forget(written)
        sent = self._value(args[1]) if exchanges else None
        if sent is not None:
            group = collectives.group(operator, args, {})
            with _disable_current_modes():
                self._values[args[0]] = torch.cat([sent.chunk(group.size())[group.rank()]] * group.size())

    def _follow(self, operator: OpOverload, name: str, args: tuple, kwargs: dict, result: Any) -> None:
        """Compute the values of a result where all that it follows from is known."""
        fakes = tensors((args, kwargs))
        known = all(self._value(fake) is not None for fake in fakes) or name in LIKE
        drawn = torch.Tag.nondeterministic_seeded in operator.tags or name.startswith("empty")
        large = any(value.numel() > LARGEST for value in tensors(result))
        if known and not drawn and not large:
            with suppress(NotImplementedError):  # the CPU has no kernel for the dtype
                for fake, value in zip(tensors(result), tensors(self._compute(operator, args, kwargs))):
                    self._values[fake] = value
            return
        for argument, value in zip(operator._schema.arguments, args):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._forget(value)

    def _compute(self, operator: OpOverload, args: tuple, kwargs: dict) -> Any:
        """Run an operator on the CPU, with zeros for what is not known."""

        def value(fake: Tensor) -> Tensor:
            known = self._value(fake)
            # without memory of its own, since it may be a weight
            return torch.zeros((), dtype=fake.dtype).expand(fake.shape) if known is None else known

        with _disable_current_modes():
            args, kwargs = tree_map_only(Tensor, value, (args, kwargs))
            args, kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
            return operator(*args, **kwargs)

    def _sized_by_values(self, operator: OpOverload, sizing: Any, args: tuple, kwargs: dict) -> Any:
        if any(self._value(fake) is None for fake in tensors(sizing)):
            raise UnknownValueError(operator)
        known = all(self._value(fake) is not None for fake in tensors((args, kwargs)))
        device = args[0].device

        def fake(value: Tensor) -> Tensor:
            made = torch.empty(value.shape, dtype=value.dtype, device=device)
            return self.learn(made, value) if known else made

        return tree_map_only(Tensor, fake, self._compute(operator, args, kwargs))

    def _value(self, tensor: Tensor) -> Tensor | None:
        """Return the values of a tensor on the CPU; None if they are not known.

        Those of one that is not fake, such as what a list of numbers becomes, are.
        """
        if isinstance(tensor, FakeTensor):
            return self._values.get(tensor)
        with _disable_current_modes():
            return tensor.cpu()

    def _forget(self, fake: Tensor) -> None:
        """Forget what a tensor holds that was written, and its views."""
        if not isinstance(fake, Tensor) or fake not in self._values:
            return
        storage = self._values[fake].untyped_storage().data_ptr()
        for other in [k for k, v in self._values.items() if v.untyped_storage().data_ptr() == storage]:
            del self._values[other]


def _sizing(operator: OpOverload, name: str, args: tuple) -> Any:
    """Return the argument whose values tell how large a result is; None where sizes alone do."""
    if name == "index":  # by a mask, of which torch makes indices
        return args[1] if _has_mask(args[1]) else None
    if name == "repeat_interleave" and len(args) > 1:  # an operator of its own on the NPU, and elsewhere two
        return args[1] if isinstance(args[1], Tensor) else None
    if torch.Tag.dynamic_output_shape not in operator.tags:
        return None
    if name not in _SIZED_BY:
        raise UnknownValueError(operator)
    return args[_SIZED_BY[name]]


def _crossings(name: str, args: tuple, kwargs: dict, result: Any) -> tuple[int, bool]:
    """Return how often the host waits in a call, and whether it copies from the host, which no graph holds.

    Reading a value, and a size that values tell, are counted elsewhere. Making a tensor of numbers copies them.
    """
    if name in ("copy_", "_to_copy"):
        target, source = args[:2] if name == "copy_" else (result, args[0])
        way = source.device.type, target.device.type
        return way == ("npu", "cpu"), way == ("cpu", "npu")
    if name == "lift_fresh":  # torch.tensor() calls it after its copy
        return 0, args[0].device.type == "npu"
    if name in _MASKED:  # for how many a mask selects
        return args[0].device.type == "npu" and _has_mask(args[1]), False
    if name == "histc" and args[0].device.type == "npu":  # without a range op-plugin reads both ends of the data
        low, high = [*args[2:], *(kwargs.get(end, 0) for end in ("min", "max")[len(args[2:]) :])]
        return 2 * (low == high), False
    return 0, False


def _has_mask(indices: Any) -> bool:
    """Tell whether one of these indices is a mask."""
    return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors(indices))
