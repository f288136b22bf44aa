"""How rotary functions are called: which argument is rotated, and the shapes of what holds the angles.

A form gives each argument dimensions by symbols: ``B`` sequences, ``S`` positions, ``N`` heads of q and ``M`` of k,
``D`` the head size, ``T`` rows of a table that are chosen from, and ``R`` the width that is rotated, ``H`` half of it,
``W`` twice; ``P`` is the value of a number. A module that rotates is a function of its arguments and of the tensors
that it holds, of which the dimensions are known.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from kernels_ext_npu.recognition.rotations.signatures import Signature

Dims = tuple["str | int", ...]
Settings = tuple[tuple[type, Any], ...]  # types and values
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_TAKEN = {"float": FLOATS, "complex": (torch.complex64, torch.complex128), "index": (torch.int64, torch.int32)}
_ROTATED: tuple[Dims, ...] = (
    ("B", "N", "S", "D"),
    ("B", "S", "N", "D"),
    ("S", "B", "N", "D"),
    ("S", "N", "D"),
    ("N", "S", "D"),
)
_ROWS: tuple[Dims, ...] = (
    *(("S",), (1, "S"), ("B", "S"), ("S", 1), ("S", "B"), (1, 1, "S"), (1, "S", 1), ("B", 1, "S"), ("B", "S", 1)),
    *(("S", 1, 1), ("S", "B", 1), ("T",), ("T", 1), (1, "T"), (1, 1, "T"), (1, "T", 1)),
)
_WIDTHS: tuple[Dims, ...] = (("R",), ("H",))
_SIZES = {"B": 3, "N": 5, "M": 2, "S": 7, "T": 11, "D": 16, "R": 16, "H": 8, "W": 32, "P": 2}
_DIMENSIONS = (1, 2)  # of positions or heads
_MOST = 3  # parameters of a module that may be given tensors: more would be many forms
_LONGEST = 512  # rows of a table that hold random numbers: as many are not run for a try
_MOST_ROWS = 4096  # of a table of which all are taken
_POSITIONS: tuple[Dims, ...] = (("B", "S"), (1, "S"), ("S",), ("S", "B"))


@dataclass(frozen=True)
class Given:
    """A tensor that a parameter is given; two of them in a tuple stand for two in a tuple or list."""

    dims: Dims
    kind: str = "float"

    def dim(self) -> int:
        """Return how many dimensions it has, as tensors say it."""
        return len(self.dims)

    def make(self, sizes: Mapping[str, int], dtype: torch.dtype) -> Tensor:
        """Return random numbers."""
        shape = [dim if isinstance(dim, int) else sizes[dim] for dim in self.dims]
        if self.kind == "index":
            return torch.randint(1, sizes["T"], shape)  # at the first one nothing may be rotated
        if self.kind == "complex":
            dtype = torch.complex128 if dtype is torch.float64 else torch.complex64
        wide = torch.complex128 if dtype.is_complex else torch.float64
        if all(size <= _LONGEST for size in shape):
            return torch.randn(shape, dtype=wide).to(dtype)
        made = torch.zeros(shape, dtype=dtype)  # of which nothing is in memory before it is written to
        first = made[tuple(slice(_LONGEST) for _ in shape)]
        first.copy_(torch.randn(first.shape, dtype=wide))
        return made


NUMBER: Any = object()  # stands for a whole number, such as that of a position
FREQUENCIES = Given(("H",))


@dataclass(frozen=True, eq=False)
class Form:
    """One way to call a rotary function: what each parameter is given, tensors, `NUMBER` or the value of a setting."""

    given: tuple[Any, ...]
    rotated: int  # how many of the first parameters are rotated
    width: int | None = None  # that is rotated, of a module; None of a function, whose tables say it

    @property
    def ranks(self) -> tuple[Any, ...]:
        """How many dimensions its arguments have, as :func:`ranks` says it of values."""
        return ranks(self.given, Given)

    @property
    def settings(self) -> Settings:
        """What it has for parameters that take no tensors."""
        return tuple((type(g), g) for g, rank in zip(self.given, self.ranks) if rank is None)

    def with_settings(self, settings: Settings) -> Form:
        """Return the form that has other settings."""
        values = iter(value for _, value in settings)
        given = (next(values) if rank is None else g for g, rank in zip(self.given, self.ranks))
        return Form(tuple(given), self.rotated)

    @property
    def cuts_tables(self) -> bool:
        """Whether tables have as many rows as a position may need, of which the function takes the first or others."""
        kinds = [given.kind for given in self.angles if "T" in given.dims]
        return ("float" in kinds and all(given.kind != "index" for given in self.angles)) or "complex" in kinds

    @property
    def table_dtype(self) -> torch.dtype:
        """In which dtype tables are exact: complex numbers are of two float32, and some functions take no others."""
        return torch.float32 if any(each.kind == "complex" for each in self.angles) else torch.float64

    @property
    def heads(self) -> int:
        """The dimension of the heads."""
        return self.given[0].dims.index("N")

    @property
    def angles(self) -> list[Given]:
        """What holds the angles, or chooses from them."""
        return [each for each in _one_by_one(self.given[self.rotated :]) if isinstance(each, Given)]

    def small_sizes(self, **others: int) -> dict[str, int]:
        """Return sizes to try it with."""
        return {**_SIZES, **({} if self.width is None else {"D": self.width, "R": self.width}), **others}

    def sizes(self, values: Sequence[Any]) -> dict[str, int] | None:
        """Return what the symbols stand for in a call; None if it is of another form."""
        sizes: dict[str, int] = {}
        for given, value in zip(_one_by_one(self.given), _one_by_one(values)):
            if given is NUMBER:
                if type(value) is not int:
                    return None
            elif not isinstance(given, Given):
                if type(value) is not type(given) or value != given:
                    return None
            elif type(value) not in (Tensor, nn.Parameter) or value.dtype not in _TAKEN[given.kind]:
                return None
            else:
                for dim, size in zip(given.dims, value.shape):
                    if size != (dim if isinstance(dim, int) else sizes.setdefault(dim, size)):
                        return None
        if self.cuts_tables and sizes["T"] < sizes["S"]:
            return None
        if self.width is not None:
            sizes["R"] = self.width
        elif "R" not in sizes:
            sizes["R"] = 2 * sizes["H"] if "H" in sizes else sizes["W"] // 2 if "W" in sizes else sizes["D"]
        return sizes

    def asked_shape(self, values: Sequence[Any]) -> list[int]:
        """Return the shape of two heads of a call, of one sequence if the angles of all are the same."""
        sizes: Any = self.sizes(values)
        is_one = self.given[0].dims[0] == "B" and not any("B" in given.dims for given in self.angles)
        return [
            {"N": 2, "B": 1 if is_one else sizes.get("B")}.get(dim, sizes.get(dim, dim)) for dim in self.given[0].dims
        ]

    def make(self, sizes: Mapping[str, int], dtype: torch.dtype, table_dtype: torch.dtype) -> list[Any]:
        """Return random arguments of this form."""

        def make(given: Any, dtype: torch.dtype) -> Any:
            if type(given) is tuple:
                return tuple(make(each, dtype) for each in given)
            if isinstance(given, Given):
                return given.make(sizes, dtype)
            return sizes["P"] if given is NUMBER else given

        return [make(given, dtype if at < self.rotated else table_dtype) for at, given in enumerate(self.given)]

    def tables(self, values: Sequence[Any]) -> list[Tensor]:
        """Return the tensors of a call that are not rotated."""
        pairs = zip(_one_by_one(self.given[self.rotated :]), _one_by_one(values[self.rotated :]))
        return [value for given, value in pairs if isinstance(given, Given)]


def candidate_forms(signature: Signature) -> Iterator[Form]:
    """Yield the forms that the parameters of a rotary function may have; none where they are not plain."""
    if not signature.is_plain:
        return
    defaults = [default for place, default in enumerate(signature.defaults) if place not in signature.dimensions]
    required = defaults.count(inspect.Parameter.empty)
    for first, tables in product(_first_arguments(), _tables()):
        given = (*first, *tables)
        if required <= len(given) <= signature.positional - len(signature.dimensions):
            rest = [_values(default) for default in defaults[len(given) :]]
            for settings in product(*rest, *[_DIMENSIONS for _ in signature.dimensions]):
                whole = [*given, *settings[: len(rest)]]
                for place, dimension in zip(signature.dimensions, settings[len(rest) :]):
                    whole.insert(place, dimension)
                yield Form(tuple(whole), len(first))


def _first_arguments() -> Iterator[tuple[Given, ...]]:
    """Yield what may be rotated: q and k, of other heads or as many, or one tensor."""
    for dims in _ROTATED:
        yield Given(dims), Given(tuple("M" if dim == "N" else dim for dim in dims))
    yield from ((Given(dims), Given(dims)) for dims in _ROTATED)
    yield from ((Given(dims),) for dims in _ROTATED)


def forms_with(signature: Signature, held: Sequence[Tensor], numbers: Collection[int]) -> Iterator[Form]:
    """Yield the forms that a module may have that rotates, and holds tensors and numbers."""
    kinds = [next((kind for kind, dtypes in _TAKEN.items() if each.dtype in dtypes), "") for each in held]
    several = [default for default in signature.defaults if default is None or default is inspect.Parameter.empty]
    if not all(kinds) or len(several) > _MOST:
        return
    tables = [Given(tuple(each.shape), kind) for each, kind in zip(held, kinds)]
    sizes = {size for size in numbers if size > 1}.union(size for each in held for size in each.shape[-2:] if size > 1)
    widths = {width for size in sizes for width in (size, 2 * size, size // 2) if width % 2 == 0 and width <= _LONGEST}
    rows = {size for each in held for size in each.shape[:-1] if 1 < size <= _MOST_ROWS}
    # of any number of positions, or of as many as a table has rows: a picture always has so many patches
    lengths: tuple[str | int, ...] = ("S", *sorted(rows))
    for length, rotated, symbols, width in product(lengths, (2, 1), _ROTATED, sorted(widths)):
        if rotated <= signature.positional:
            dims: Dims = tuple(length if dim == "S" else dim for dim in symbols)
            first = (Given(dims), Given(tuple("M" if dim == "N" else dim for dim in dims)))[:rotated]
            for settings in product(*map(_module_values, signature.defaults[rotated:])):
                yield Form((*first, *settings, *tables), rotated, width)


def _module_values(default: Any) -> tuple[Any, ...]:
    """Return what a parameter of a module may be given: beside its default positions, or the number of the first."""
    if default is None or default is inspect.Parameter.empty:
        others = (None,) if default is None else (NUMBER,)
        return (*others, *(Given(positions, "index") for positions in _POSITIONS))
    return (NUMBER, default) if type(default) is int else (default,)


def _values(default: Any) -> tuple[Any, ...]:
    """Return what a parameter may be given that has a default: if that is a dimension for the heads, either."""
    return _DIMENSIONS if type(default) is int and default in _DIMENSIONS else (default,)


def ranks(values: Sequence[Any], kind: Any = Tensor) -> tuple[Any, ...]:
    """Return how many dimensions tensors have, those in a tuple or list in a tuple; None in place of anything else."""

    def rank(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            inner = ranks(value, kind)
            return None if set(inner) <= {None} else inner
        return value.dim() if isinstance(value, kind) else None

    return tuple(map(rank, values))


def _one_by_one(values: Sequence[Any]) -> Iterator[Any]:
    """Yield values, and in place of a tuple or list what is in it."""
    for value in values:
        yield from value if isinstance(value, (tuple, list)) else (value,)


def _tables() -> Iterator[tuple[Any, ...]]:
    """Yield what may hold the angles: cos and sin, or both in one, with positions that choose rows or not, or these."""
    for rows in _ROWS:
        forms: list[tuple[Any, ...]] = []
        for width in _WIDTHS:
            dims = (*rows, *width)
            forms += [(Given(dims), Given(dims)), (Given(dims),), ((Given(dims), Given(dims)),)]
        forms += [(Given((*rows, *width)),) for width in (("W",), ("H", 2), ("H", 2, 2))]
        forms.append((Given((*rows, "H"), "complex"),))
        yield from forms
        if "T" in rows:
            chosen = [(form, Given(positions, "index")) for form in forms for positions in _POSITIONS]
            yield from ((*form, positions) for form, positions in chosen)
            yield from ((positions, *form) for form, positions in chosen)
    yield from ((Given(positions, "index"),) for positions in _POSITIONS)
    yield (FREQUENCIES,)
