"""Which attention is computed on chosen keys, and where."""

import pytest
from torch import Tensor

from kernels_ext_npu.swaps.attention import latents


@pytest.fixture
def chosen(monkeypatch) -> list[int]:
    """The numbers of queries of each attention to chosen keys."""
    queries: list[int] = []
    attend = latents.Latents.attend_chosen

    def noted(self, call, query: Tensor, *rest) -> Tensor:
        queries.append(query.shape[2])
        return attend(self, call, query, *rest)

    monkeypatch.setattr(latents.Latents, "attend_chosen", noted)
    return queries


@pytest.fixture
def always(monkeypatch) -> None:
    """Attend to chosen keys wherever there are more."""
    monkeypatch.setattr(
        latents.Latents, "is_cheaper_of_chosen", lambda self, queries, count, gathered: count < self.nope.shape[2]
    )
