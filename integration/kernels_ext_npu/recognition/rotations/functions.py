"""Rotary functions of other people's code, found by running them: no spelling and no name is looked at.

A rotation is ``x * cos + turned(x) * sin``, linear in x: what a function makes of ones in the first value of each pair,
and of ones in the second, is cos and sin as it has them, whatever holds the angles, in which layout and order. So a
function is asked for cos and sin, once for all heads, and the kernel rotates by them. That this is what it computes is
found out on small random numbers on the CPU, for each way in which it may be called: in float64 with gradients, at one
position and at several, and in 16 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from kernels_ext_npu.recognition.computed import NotRecognisedError
from kernels_ext_npu.recognition.function_settings import CONSTANTS, Setting, hold, read_globals
from kernels_ext_npu.recognition.rotations.asked_lengths import asked_lengths
from kernels_ext_npu.recognition.rotations.forms import FREQUENCIES, NUMBER, Form, Settings, candidate_forms, ranks
from kernels_ext_npu.recognition.rotations.pairs import PAIRINGS, Pairing, rotary_mul
from kernels_ext_npu.recognition.rotations.signatures import Signature, candidate_signatures
from kernels_ext_npu.recognition.stand_ins import on_stand_in
from kernels_ext_npu.recognition.watched_runs import ANYTHING, Watched, are_same, is_close, isolated

_OTHER_SIZES = ({"B": 1, "N": 1, "M": 1, "S": 1}, {"S": 1}, {"B": 1, "T": 7, "P": 0})
_OPERATORS = {
    *("cat", "stack", "index", "index_select", "gather", "embedding", "repeat", "repeat_interleave", "flip", "roll"),
    *("view_as_complex", "view_as_real", "complex", "polar", "_conj", "real", "imag", "cos", "sin", "outer"),
    *("arange", "copy", "fill", "empty_like", "empty", "zeros_like", "new_empty", "slice_scatter", "contiguous"),
}
_PRODUCTS = {"mm", "bmm"}  # whose dtypes autocast decides
OPERATORS = frozenset(_OPERATORS | _PRODUCTS)
_MOST_OTHERS = 12  # forms that a function takes that is no rotation of any
# which a function is tried with that is called with the same ranks; a number may be another each time
_MOST_SETTINGS = 8
Members = tuple[tuple[str, Any], ...]  # names and values


@dataclass(frozen=True)
class Dtypes:
    """What comes out for some dtypes, and that of the ones that a function is asked by for cos and sin."""

    result: torch.dtype
    asked: torch.dtype


@dataclass(frozen=True, eq=False)
class Plan:
    """What a function computes of a form."""

    form: Form
    pairing: Pairing
    makes: type = tuple  # tuple or list of what is rotated; Tensor of one
    is_partial: bool = False  # whether it may rotate a part of a head, and pass the rest through
    multiplies: bool = False  # whether it calls products of matrices, whose dtypes autocast decides
    is_for: Callable[[int], bool] = bool  # whether it is so for a number of positions: a module may ask for that


class Rotation:
    """A rotary function, or a method of modules. Each way in which it is called is looked at when it first is.

    Args:
        function: what is called.
        signature: of it.
        settings: what it reads of its files.
        forms: of a module that rotates, which computes of values in their order; None of a function or a method.
        members: what a method reads of its module, and their values.
    """

    def __init__(
        self,
        function: Callable,
        signature: Signature,
        settings: tuple[Setting, ...] = (),
        forms: Iterable[Form] | None = None,
        members: Members = (),
    ) -> None:
        self.function, self.signature, self.settings, self.members = function, signature, settings, members
        self._compute: Callable = function if forms is not None else lambda *values: signature.call(function, values)
        self._forms: dict[tuple[Any, ...], dict[Settings, list[Form]]] = {}  # by ranks, those of functions by settings
        self._is_function = forms is None
        for form in candidate_forms(signature) if forms is None else forms:
            given = form.settings if self._is_function else ()
            self._forms.setdefault(form.ranks, {}).setdefault(given, []).append(form)
        self._plans: dict[Form, Plan | None] = {}
        self._others = 0  # forms that it takes, and of which it is no rotation
        self.refused: str | None = None  # what it does that is in no rotation, if that was seen
        self.left: str | None = None  # shapes of which it was called and is not known to be a rotation
        self._dtypes: dict[tuple[Plan, torch.dtype, torch.dtype], Dtypes | None] = {}

    @functools.cached_property
    def layer(self) -> str:
        """The layer that computes the same of cos and sin; empty if there is no form of which it is a rotation."""
        forms = [form for by_settings in self._forms.values() for forms in by_settings.values() for form in forms]
        with isolated():  # once for hundreds of forms, each of which most functions refuse at their first operator
            for form in forms:
                if (plan := self._try(form)) is not None:
                    return plan.pairing.layer
                if self._others >= _MOST_OTHERS:
                    break
        return ""

    def holds(self, *modules: Any) -> bool:
        """Tell whether what it was read from is as it was, or as that is in a module where it is a method."""
        found = ((getattr(module, name, None), value) for module in modules for name, value in self.members)
        return hold(self.settings) and all(type(each) is type(value) and each == value for each, value in found)

    def plan(self, values: Sequence[Any]) -> Plan | None:
        """Return what it computes of arguments, one for each parameter; None if that is unknown."""
        for form in self._forms_called(values):
            sizes = form.sizes(values)
            if sizes is not None and form not in self._plans:
                with isolated():
                    self._try(form)
            if sizes is not None and (plan := self._plans[form]) is not None:
                is_whole = sizes["R"] == sizes["D"]
                is_taken = is_whole or (plan.is_partial and 0 < sizes["R"] < sizes["D"])
                return plan if is_taken and plan.is_for(sizes.get("S", 1)) else None
        return None

    def _forms_called(self, values: Sequence[Any]) -> list[Form]:
        """Return the forms that have the ranks of a call; of a function with its settings, whatever they are."""
        key = ranks(values)
        by_settings = self._forms.get(key, {})
        if not self._is_function:
            return by_settings.get((), [])
        asked = zip(values, key, self.signature.defaults)
        given = tuple((type(v), NUMBER if _is_offset(v, default) else v) for v, rank, default in asked if rank is None)
        if not by_settings or not all(issubclass(kind, CONSTANTS) for kind, _ in given):
            return []
        if given not in by_settings:
            if len(by_settings) >= _MOST_SETTINGS:
                return []
            others = next(iter(by_settings.values()))
            by_settings[given] = [form.with_settings(given) for form in others]
        return by_settings[given]

    def dtypes(self, plan: Plan, dtype: torch.dtype, table_dtype: torch.dtype) -> Dtypes | None:
        """Return what comes out for the dtypes of what is rotated and of what holds the angles; None if unknown."""
        key = plan, dtype, table_dtype
        if key not in self._dtypes:
            self._dtypes[key] = None
            with suppress(*ANYTHING), isolated():
                self._dtypes[key] = _dtypes(self._compute, plan, dtype, table_dtype)
        return self._dtypes[key]

    def _try(self, form: Form) -> Plan | None:
        """Return what the function computes of a form; where nothing that surrounds the call is seen."""
        if form not in self._plans:
            self._plans[form] = None
            torch.default_generator.manual_seed(0)  # the same numbers, whatever was tried before
            try:
                self._plans[form] = plan = _plan(self._compute, form)
                self._others += plan is None
            except NotRecognisedError as error:
                self.refused = str(error)
            except ANYTHING:
                pass
        return self._plans[form]


def _is_offset(value: Any, default: Any) -> bool:
    """Tell whether a setting may be the number of the first position, which is another one each time."""
    return type(value) is int and value > 0 and type(default) is int and default == 0


def ask(
    function: Callable, plan: Plan, values: Sequence[Any], dtype: torch.dtype, question: Callable[..., Tensor]
) -> tuple[Tensor, Tensor]:
    """Ask a function for its cos and sin: what it makes of ones, in which pairs turn by a right angle, is both.

    Both have the dimensions of what is rotated, with one head, with one sequence if the angles of all are the same, and
    as many values as are rotated.

    Args:
        function: which is called for two heads.
        plan: what it computes.
        values: the arguments of a call, one for each parameter.
        dtype: of the ones.
        question: `make_question`, or what keeps what that has made.
    """
    form, pairing = plan.form, plan.pairing
    width, shape = form.sizes(values)["R"], form.asked_shape(values)  # type: ignore[index]
    with torch.no_grad():
        ones = question(pairing, width, shape[-1], dtype, values[0].device)
        ones = ones.view([size if dim in ("N", "D") else 1 for dim, size in zip(form.given[0].dims, shape)])
        ones = ones.expand(shape)
        result = function(*[ones] * form.rotated, *values[form.rotated :])
        result = result if form.rotated == 1 else result[0]
        first, second = (pairing.given.split(part[..., :width]) for part in result.split(1, form.heads))
        return pairing.given.join(first[0], second[1]), pairing.given.join(-second[0], first[1])


def make_question(pairing: Pairing, width: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ones in the first values of all pairs, and in the second: two heads, zero beyond the width."""
    one, zero = torch.ones(width // 2, dtype=dtype, device=device), torch.zeros(width // 2, dtype=dtype, device=device)
    ones = torch.stack((pairing.taken.join(one, zero), pairing.taken.join(zero, one)))
    return nn.functional.pad(ones, (0, size - width))


_known: dict[tuple[FunctionType, Members], Rotation | None] = {}


def find_rotation(function: FunctionType, cls: type | None = None, members: Members = ()) -> Rotation | None:
    """Return how a function rotates, without a layer if it does something else; None if it cannot be run for a try.

    Of a method that is how it rotates for modules of a class with some members.
    """
    key = function, members
    known = _known.get(key)
    if key not in _known or (known is not None and not known.holds()):
        settings = read_globals(function, cls or object)
        signatures = () if settings is None else candidate_signatures(function, cls is not None)
        called = function if cls is None else functools.partial(on_stand_in(cls, function, dict(members)), {})
        found = (Rotation(called, each, settings, members=members) for each in signatures)  # type: ignore[arg-type]
        first = next(found, None)
        is_other = first is not None and not first.layer
        _known[key] = next((each for each in found if each.layer), first) if is_other else first
    return _known[key]


def _run(function: Callable, form: Form, values: Sequence[Any], called: set[str] | None = None) -> list[Tensor]:
    """Return what a function makes of what it rotates; raise if it does anything but arithmetic."""
    tensors = [*values[: form.rotated], *form.tables(values)]
    versions = [tensor._version for tensor in tensors]
    with Watched(OPERATORS) as watched:
        result = function(*values)
    if called is not None:
        called.update(watched.called)
    if [tensor._version for tensor in tensors] != versions:
        raise NotRecognisedError("it writes to its arguments")
    results = [result] if form.rotated == 1 else list(result)
    if len(results) != form.rotated:
        raise ValueError("it returns something else")
    return results


def _plan(function: Callable, form: Form) -> Plan | None:
    """Return what a function computes of a form; None, or any error, if it computes something else."""
    values, called = form.make(form.small_sizes(), torch.float64, form.table_dtype), set[str]()
    results = _run(function, form, values, called)
    if any(result.shape != x.shape for result, x in zip(results, values)):
        raise ValueError("it returns something else")
    makes: Any = type(function(*values))
    for pairing in PAIRINGS:
        plan = Plan(form, pairing, makes)
        if makes in (Tensor, tuple, list) and _is_same(function, plan, form.small_sizes()):
            break
    else:
        return None
    if not all(_is_same(function, plan, form.small_sizes(**sizes)) for sizes in _OTHER_SIZES):
        return None
    is_for = asked_lengths(function, form)
    if is_for is None:
        return None
    is_partial = False
    with suppress(*ANYTHING):
        is_partial = _is_same(function, plan, form.small_sizes(D=2 * form.small_sizes()["D"]))
    return Plan(form, pairing, makes, is_partial, not called.isdisjoint(_PRODUCTS), is_for)


def _is_same(function: Callable, plan: Plan, sizes: Mapping[str, int]) -> bool:
    """Tell whether a function rotates as a plan says, and its gradients are those of that."""
    form = plan.form
    for with_grad in (False, True):
        values = form.make(sizes, torch.float64, form.table_dtype)
        cos, sin = ask(function, plan, values, torch.float64, make_question)
        # whose angles, which a module may make or a function of frequencies, are zero
        is_first = sizes["S"] == 1 and (form.width is not None or form.angles == [FREQUENCIES])
        if not (is_first or sin.any()):  # which is no rotation
            return False
        given = [x.requires_grad_(with_grad) for x in values[: form.rotated]]
        with torch.set_grad_enabled(with_grad):
            results = _run(function, form, values)
            expected = [plan.pairing.rotate(x, cos, sin, rotary_mul) for x in given]
            if not all(are_same(result, each, [x]) for result, each, x in zip(results, expected, given)):
                return False
    return True


def _dtypes(function: Callable, plan: Plan, dtype: torch.dtype, table_dtype: torch.dtype) -> Dtypes | None:
    """Return what comes out for some dtypes; None, or any error, if the function computes something else of them."""
    form = plan.form
    values = form.make(form.small_sizes(), dtype, table_dtype)
    errors = {}
    for asked in dict.fromkeys((dtype, torch.float32)):
        result = _run(function, form, values)[0]
        cos, sin = ask(function, plan, values, asked, make_question)
        expected = plan.pairing.rotate(values[0].double(), cos.double(), sin.double(), rotary_mul)
        if is_close(result, expected):
            errors[asked] = (result.double() - expected).abs().mean().item()
    if not errors:
        return None
    return Dtypes(result.dtype, min(errors, key=errors.__getitem__))  # the first of two that are equal
