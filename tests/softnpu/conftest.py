"""What the tests of the software device share: the same random numbers in each, and what all operators have to be."""

from collections.abc import Iterator

import pytest
import torch

from tests.softnpu import conforming


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _conforming(request: pytest.FixtureRequest) -> Iterator[None]:
    """Hold each operator that a test of formulas calls against the wheel."""
    if not request.path.stem.endswith("formulas"):
        yield
        return
    with conforming.Calls() as calls:
        yield
    for call in calls.found:
        conforming.assert_conforms(*call)
