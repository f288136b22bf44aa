"""Formulas under the schemas of other releases: parameters by name, their defaults, fewer results."""

import pytest
import torch
from torch import Tensor

from softnpu.schema_adapter import adapted


def formula(
    input: Tensor, bias: Tensor | None = None, mode: int = 2, *, scale: float = 1.0
) -> tuple[Tensor, int, float]:
    """As the newest schema has it."""
    return (input if bias is None else input + bias) * scale, mode, scale


def called(schema: str, *arguments, **options) -> tuple:
    """Call the formula as an operator with the schema of another release."""
    with torch.library._scoped_library("fitting", "DEF") as library:
        name = library.define(schema)
        return adapted(getattr(torch.ops.fitting, name).default, formula)(*arguments, **options)


@pytest.mark.parametrize(
    ("schema", "arguments", "options", "expected"),
    [
        # the newest one
        (
            "a(Tensor input, Tensor? bias=None, int mode=2, *, float scale=1.0) -> (Tensor, int, float)",
            (torch.ones(2), torch.ones(2), 3),
            {"scale": 2.0},
            (4.0, 3, 2.0),
        ),
        # without the parameter in between, positions say something else
        ("b(Tensor input, int mode=2) -> (Tensor, int, float)", (torch.ones(2), 3), {}, (1.0, 3, 1.0)),
        # another default
        ("c(Tensor input, Tensor? bias=None, int mode=7) -> (Tensor, int, float)", (torch.ones(2),), {}, (1.0, 7, 1.0)),
        # fewer results
        ("d(Tensor input, Tensor? bias=None) -> (Tensor, int)", (torch.ones(2), torch.ones(2)), {}, (2.0, 2)),
        # a parameter that the formula has not, at its default
        ("e(Tensor input, bool fast=False, int mode=4) -> (Tensor, int, float)", (torch.ones(2),), {}, (1.0, 4, 1.0)),
    ],
)
def test_a_formula_is_called_as_the_schema_says(schema, arguments, options, expected) -> None:
    result, *others = called(schema, *arguments, **options)
    assert (result[0].item(), *others) == expected


def test_a_parameter_that_the_formula_has_not_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="fitting::f: the software device has no parameter fast"):
        called("f(Tensor input, bool fast=False) -> (Tensor, int, float)", torch.ones(2), True)
