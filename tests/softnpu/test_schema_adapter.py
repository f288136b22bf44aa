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


def called(schema: str, *arguments) -> tuple:
    """Call the formula as an operator with the schema of another release."""
    with torch.library._scoped_library("fitting", "DEF") as library:
        name = library.define(schema)
        return adapted(getattr(torch.ops.fitting, name).default, formula)(*arguments)


ONES = torch.ones(2)
THREE = "(Tensor, int, float)"


@pytest.mark.parametrize(
    ("schema", "arguments", "expected"),
    [
        (
            f"a(Tensor input, Tensor? bias=None, int mode=2, *, float scale=1.0) -> {THREE}",
            (ONES, ONES, 3),
            (2.0, 3, 1.0),
        ),
        (f"b(Tensor input, int mode=2) -> {THREE}", (ONES, 3), (1.0, 3, 1.0)),  # positions say something else
        (f"c(Tensor input, Tensor? bias=None, int mode=7) -> {THREE}", (ONES,), (1.0, 7, 1.0)),  # another default
        ("d(Tensor input, Tensor? bias=None) -> (Tensor, int)", (ONES, ONES), (2.0, 2)),  # fewer results
        (f"e(Tensor input, bool fast=False, int mode=4) -> {THREE}", (ONES,), (1.0, 4, 1.0)),  # fast at its default
    ],
)
def test_a_formula_is_called_as_the_schema_says(schema, arguments, expected) -> None:
    result, *others = called(schema, *arguments)
    assert (result[0].item(), *others) == expected


def test_a_parameter_that_the_formula_has_not_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="fitting::f: the software device has no parameter fast"):
        called("f(Tensor input, bool fast=False) -> (Tensor, int, float)", torch.ones(2), True)
